"""Operators that no sharding rule knows, as the operators they consist of."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, mutates, shape_of, tensor_operands
from sp_compiler.ir.op_traits import draws
from sp_compiler.ir.rewriting import fake_mode_of, insert_call, replace_call, replace_results
from sp_compiler.ir.symbolic import is_open
from sp_compiler.rules.table import has_rule
from sp_compiler.trace.functionalize.composites import call_signature, is_composite, trace_call

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten


def glu(node: Node) -> None:
    """``glu(x)`` -> ``a * sigmoid(b)`` of the halves of ``x``."""
    bound = arguments(node)
    half = shape_of(node)[bound["dim"]]
    args = (bound["self"], [half, half], bound["dim"])
    halves = insert_call(node, _aten.split_with_sizes.default, args, origin=_ORIGIN)
    value, gate = (
        insert_call(node, operator.getitem, (halves, part), origin=_ORIGIN) for part in (0, 1)
    )
    gate = insert_call(node, _aten.sigmoid.default, (gate,), origin=_ORIGIN)
    replace_call(node, _aten.mul.Tensor, (value, gate), origin=_ORIGIN)


def masked_write(node: Node) -> None:
    """``x[mask] = v``, and ``+= v`` -> ``where(mask, v, x)``, and ``x + where(mask, v, 0)``.

    Only if ``v`` is the same at all places: its gradient would be a tensor of as many rows as the
    mask selects, which is unknown.
    """
    bound = arguments(node)
    x, value, indices = bound["self"], bound["values"], list(bound["indices"])
    while indices[-1] is None:
        indices.pop()
    *before, mask = indices
    if any(index is not None for index in before) or mask.meta["val"].dtype != torch.bool:
        return
    if bound["accumulate"] and x.meta["val"].dtype == torch.bool:  # not a sum
        return
    # The dims of x are those before the mask, those of the mask, and the rest.
    num_before, num_masked = len(before), len(shape_of(mask))
    rest = len(shape_of(x)) - num_before - num_masked
    shape = list(shape_of(value))
    if len(shape) > rest:
        *outer, count = shape[: len(shape) - rest]
        if is_open(count) or count != 1:
            return
        shape = [*outer, *[1] * num_masked, *shape[len(shape) - rest :]]
        value = insert_call(node, _aten.reshape.default, (value, shape), origin=_ORIGIN)
    wide = [*shape_of(mask), *[1] * rest]
    mask = insert_call(node, _aten.reshape.default, (mask, wide), origin=_ORIGIN)
    if bound["accumulate"]:
        added = insert_call(node, _aten.where.ScalarOther, (mask, value, 0), origin=_ORIGIN)
        replace_call(node, _aten.add.Tensor, (x, added), origin=_ORIGIN)
    else:
        replace_call(node, _aten.where.self, (mask, value, x), origin=_ORIGIN)


def split_composites(graph: Graph, known: Collection[object]) -> None:
    """Replace composite operators without a sharding rule by their parts, if all of those have one.

    ``multiply(x, y)`` -> ``mul(x, y)``; ``outer(x, y)`` -> ``reshape(x, (n, 1)) * y``. They are
    synonyms of operators, such as NumPy's names, or short for a few operators; left whole, they
    would run replicated.

    Args:
        known: operators that later steps rewrite, in addition to those with a rule.
    """
    bodies: dict[Hashable, Graph | None] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target in known or not is_composite(node.target):
            continue
        if has_rule(node) or draws(node):
            continue
        # Every layer has the same few calls.
        key = call_signature(node)
        if key not in bodies:
            bodies[key] = _known_parts(node, known)
        if (body := bodies[key]) is not None:
            _replace(node, body)


def _known_parts(node: Node, known: Collection[object]) -> Graph | None:
    """Return the operators that a call runs, ``None`` if a later pass does not know one."""
    if not all(isinstance(x.meta["val"], Tensor) for x in node.all_input_nodes):
        return None  # an open size, which tracing would replace by the example's
    shapes = [x.meta["val"].shape for x in node.all_input_nodes]
    sizes = [leaf.node.expr for leaf in chain(*shapes) if is_open(leaf)]
    numbers = filter(is_open, tree_leaves((node.args, node.kwargs)))
    if any(number.node.expr not in sizes for number in numbers):
        return None  # an open size of another tensor, which the tracer would not know
    body = trace_call(node, fake_mode_of(node.graph))
    # A constant among the parts would be an attribute of another module.
    is_known = not body.find_nodes(op="get_attr") and all(_is_known(x, known) for x in _calls(body))
    return body if is_known else None


def _calls(body: Graph) -> list[Node]:
    return [node for node in body.nodes if node.op == "call_function"]


def _is_known(part: Node, known: Collection[object]) -> bool:
    if part.target in (operator.getitem, *known):
        return True
    # Some write into tensors that they made, which no later pass expects.
    if not isinstance(part.target, OpOverload) or mutates(part) or draws(part):
        return False
    # Without operands: a new tensor, which is the same on all ranks.
    return has_rule(part) or not tensor_operands(part)


def _replace(node: Node, body: Graph) -> None:
    values: dict[Node, Any] = dict(
        zip(body.find_nodes(op="placeholder"), node.all_input_nodes, strict=True)
    )
    for part in _calls(body):
        args, kwargs = map_arg((part.args, part.kwargs), values.__getitem__)
        values[part] = insert_call(node, part.target, args, kwargs, origin=_ORIGIN)
    (results,) = body.output_node().args
    replace_results(node, map_arg(results, values.__getitem__))
