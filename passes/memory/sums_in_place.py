"""Sum the gradients of a parameter, and partial sums over ranks, in place.

::

    grad_0 = mm(t(g_0), x_0)             grad_1 = mm(t(g_1), x_1)
    grad_1 = mm(t(g_1), x_1)      ->     grad = add_product(grad_1, t(g_0), x_0)
    grad = add(grad_0, grad_1)

A region that uses a parameter twice, such as a layer on two half batches, computes a gradient for
each use. A separate sum holds three tensors of the parameter's size at once and passes over memory
four more times. Here a summand that is a matmul is accumulated into the total by its own kernel,
and any other summand is added in place. The total was made in this backward for the sum only.

::

    y = convert(mm(x, w), "P", "I")  ->  y = convert_in_place(mm(x, w), "P", "I")

An all-reduce of a matmul or a sum that nothing else reads is done in place too, which saves a copy.

Mutates the graph. Reads ``meta["val"]`` and ``meta["recomputed"]``; new nodes take the meta of what
they replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.fx import arguments, base_name, is_call, reach
from sp_compiler.ir.op_traits import (
    MATMULS,
    base,
    collective_of,
    is_copy,
    is_part,
    is_pure_view,
    is_view,
    view_chain,
)
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.ops.accumulate import ADD_PART, ADD_PRODUCT
from sp_compiler.ops.convert import CONVERT, CONVERT_IN_PLACE
from sp_compiler.ops.registry import operator_of

aten = torch.ops.aten


def sum_in_place(graph: Graph, grads: Iterable[Node], world_size: int) -> None:
    """Rewrite the sums in the backward ``graph`` that become ``grads`` and nothing else.

    Args:
        grads: gradients of parameters among the results of ``graph``.
        world_size: number of ranks.
    """
    sums = {node for node in reach(grads, _summands) if _is_sum(node)}
    # In graph order: of a chain of sums, each is the total of the next.
    for node in [node for node in graph.nodes if node in sums]:
        # Either operand may be the total. With the first, one of the steps with half batches in
        # docs/overlap.md took more memory than with a separate sum; with the second none does.
        pairs = (node.args[1::-1], node.args[:2])
        ways = [_way(*pair) for pair in pairs if _may_be_written(*pair)]
        if ways:
            _replace(node, max(ways, key=lambda way: way.accumulates), world_size)
            report_of(Pass.PARTITION).rewrote(kind="summed in place")
    graph.lint()


def reduce_in_place(graph: Graph) -> None:
    """Make the all-reduces of ``graph``, a forward or a backward, write into their operands."""
    for node in graph.find_nodes(op="call_function", target=CONVERT.overload):
        (total,) = node.all_input_nodes
        is_sum = is_call(base(total), *MATMULS, aten.add.Tensor)
        in_order = total.meta["val"].is_contiguous()  # otherwise the collective copies it
        if collective_of(node) == "all_reduce" and is_sum and in_order and _is_own(total):
            node.target = CONVERT_IN_PLACE.overload
            report_of(Pass.PARTITION).rewrote(kind="reduced in place")


class _Way(NamedTuple):
    """``views(total) + views(part)``, where the sum is written into ``total``.

    Attributes:
        views: of the total, the outermost first; those of the part are equal to them.
        part_views: of the part.
    """

    total: Node
    part: Node
    views: Sequence[Node]
    part_views: Sequence[Node]

    @property
    def accumulates(self) -> bool:
        """Whether the part is a matmul that nothing else reads."""
        read_once = all(len(node.users) == 1 for node in (self.part, *self.part_views))
        return read_once and is_call(self.part, aten.mm.default)


def _summands(node: Node) -> Sequence[Node]:
    """Return the operands of a view or sum that has one reader."""
    is_step = is_view(node) or is_call(node, aten.add.Tensor)
    return node.all_input_nodes if is_step and len(node.users) == 1 else ()


def _is_sum(node: Node) -> bool:
    """Return whether ``node`` is a sum of two tensors with its own layout in memory."""
    if not is_call(node, aten.add.Tensor) or len(node.users) > 1:
        return False
    operands = node.args[:2]
    if arguments(node)["alpha"] != 1 or not all(isinstance(each, Node) for each in operands):
        return False
    return all(_same_layout(node, each) for each in operands)


def _same_layout(one: Node, other: Node) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    same = same_shape(first.shape, second.shape) and same_shape(first.stride(), second.stride())
    return same and first.dtype == second.dtype


def _may_be_written(total: Node, part: Node) -> bool:
    """Return whether only a sum with ``part`` reads the memory of ``total``."""
    return total is not part and _is_own(total)


def _is_own(total: Node) -> bool:
    """Return whether this function allocated the memory of ``total``, for only its one reader."""
    owner, names = base(total), view_chain(total)
    # One of several results may be passed to another function than its operator's, as may a
    # recomputed value. One of our operators, such as a conversion, may return its operand, and so
    # may a copy whose operand already has the strides: `contiguous()`.
    is_own = not is_part(owner) and not is_copy(owner) and operator_of(owner.target) is None
    is_own = is_own and owner.op == "call_function" and not owner.meta.get("recomputed")
    read_once = all(len(node.users) == 1 for node in (owner, total, *names))
    # All of the memory: otherwise it would live on for a part of it.
    whole = same_shape([owner.meta["val"].numel()], [total.meta["val"].numel()])
    return is_own and read_once and whole


def _way(total: Node, part: Node) -> _Way:
    """Look through equal views of both, which can be made of the sum instead."""
    views, part_views = [], []
    while is_pure_view(total) and is_pure_view(part) and _call(total) == _call(part):
        inner, inner_part = total.args[0], part.args[0]
        if not _same_layout(inner, inner_part):
            break
        views.append(total)
        part_views.append(part)
        total, part = inner, inner_part
    return _Way(total, part, views, part_views)


def _call(node: Node) -> tuple[Any, ...]:
    return node.target, node.args[1:], node.kwargs


def _replace(node: Node, way: _Way, world_size: int) -> None:
    """Replace the sum ``node``, and views of its operands by views of the result."""
    total, part = way.total, way.part
    operands, operator, like = (total, part), ADD_PART, node
    if way.accumulates:
        operands, operator, like = (total, *part.args), ADD_PRODUCT, part
    with node.graph.inserting_before(node):
        result = make_like(
            node.graph, operator.overload, (*operands, world_size),
            like=like, origin=Pass.PARTITION, name=base_name(node), val=total.meta["val"],
        )  # fmt: skip
        if way.views:
            result.meta.pop("placement", None)  # it refers to the dims of the sum
        for view in reversed(way.views):
            args = (result, *view.args[1:])
            result = make_like(
                node.graph, view.target, args, view.kwargs,
                like=view, origin=Pass.PARTITION, name=base_name(view),
            )  # fmt: skip
    node.replace_all_uses_with(result)
    # Readers first; a part with other readers stays.
    for each in (node, *way.views, *way.part_views, part):
        if not each.users:
            node.graph.erase_node(each)
