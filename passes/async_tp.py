"""Matmuls that compute while their own operands or results cross the link.

::

    full = convert(x, S(0), R)           full, q, k = all_gather_matmul(x, [t(w_q), t(w_k)])
    q = linear(full, w_q)          ->    ...
    k = linear(full, w_k)                z = matmul_reduce_scatter(y, t(w_z))
    ...
    z = convert(linear(y, w_z), P, S(0))

The layers of a forward are one chain: during its collectives there is nothing else to run. But a
matmul needs only one rank's rows at a time, and torch's symmetric memory has kernels that move the
rows of one rank while they multiply those of another (:mod:`sp_compiler.ops.async_products`).

Only forwards are rewritten, and of their collectives only those that overlap has left exposed. In a
backward, weight gradients hide the communication at no cost; besides, ranks that run different
forms of a backward must meet in the same collectives. Nodes that backward recomputes stay as they
are: rows that are multiplied separately may round differently than in one matmul of all, and
backward must choose the same experts as forward.

Runs after the checks of placements: the operators do the same as the conversion and the matmuls
that were checked. Results have the meta of the nodes whose values they are.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import DeclinedError, Pass, report_of
from sp_compiler.base.placement import P, S
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.memory import function_peak_bytes
from sp_compiler.cost.node_cost import elapsed_us
from sp_compiler.cost.step_memory import Room
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import ancestors, arguments, placements_of
from sp_compiler.ir.op_traits import collective_of, draws, is_started, writes
from sp_compiler.ir.rewriting import make_call, make_like
from sp_compiler.ir.symbolic import Sizes, example_number
from sp_compiler.ops.async_products import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from sp_compiler.ops.rows import CUT_ROWS, PAD_ROWS

aten = torch.ops.aten

LEAST_ROWS = 4096
"""Rows of all ranks below which torch's kernels are slower than a separate collective and matmul:
each rank's part of the matmul becomes too small to fill the device."""
_ORIGIN = Pass.ASYNC_TP
_RECOMPUTED = "backward recomputes it, and must get bitwise the same result"
# Matmul operators -> positions of the factors, and of the bias if it has one.
_PRODUCTS = {
    aten.mm.default: (0, 1, 2),
    aten.linear.default: (0, 1, 2),
    aten.addmm.default: (1, 2, 0),
}

_PADDING = (PAD_ROWS.overload, CUT_ROWS.overload)


@dataclass(frozen=True)
class _Product:
    """A matmul of a graph: ``left`` @ ``right``, or its transpose, + ``bias``."""

    node: Node
    left: Node
    right: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> _Product | None:
        """Return ``node`` as a matmul of two matrices; ``None`` if it is something else."""
        if node.target not in _PRODUCTS or node.kwargs:  # keywords scale the summands
            return None
        left_at, right_at, bias_at = _PRODUCTS[node.target]
        left, right = node.args[left_at], node.args[right_at]
        bias = None if bias_at >= len(node.args) else node.args[bias_at]
        if left.meta["val"].dim() != 2 or right.meta["val"].dim() != 2:
            return None
        return cls(node, left, right, bias)

    @property
    def weights(self) -> Sequence[Node]:
        """The right factor, and the bias if there is one."""
        return [self.right] if self.bias is None else [self.right, self.bias]


def async_tp(
    parts: Partitioned,
    world_size: int,
    sizes: Sizes | None,
    room: Room | None,
    hardware: Hardware,
) -> Partitioned:
    """Return a copy of ``parts`` with such operators in forward, if they take less time.

    Args:
        world_size: number of ranks.
        sizes: the open sizes; memory and time are computed for the example's.
        room: allowed peaks of the region's functions, if they are above their own.
        hardware: profile for estimated times.
    """
    forward, report = parts.forward, report_of(_ORIGIN)

    def costs(graph: Graph) -> tuple[float, int]:
        example = Concretizer(sizes).graph(graph)
        return elapsed_us(example, world_size, hardware), function_peak_bytes(example)

    again = {
        node.name
        for graph in parts.functions.values()
        for node in graph.nodes
        if node.meta.get("recomputed")
    }
    time_us, own_peak_bytes = costs(forward)
    most_bytes = max(own_peak_bytes, 0 if room is None else room.forward_bytes)
    for name in [node.name for node in forward.nodes if _is_waited_for(node)]:
        # By its name: every rewrite makes a new graph, with the same names.
        node = next(each for each in forward.nodes if each.name == name)
        try:
            fused = _rewritten(node, again)
            fused_us, peak_bytes = costs(fused)
            if fused_us >= time_us:
                raise DeclinedError("it would not take less time")
            if peak_bytes > most_bytes:
                raise DeclinedError("it would raise peak memory")
        except DeclinedError as declined:
            report.decline(node, str(declined))
            continue
        report.rewrote()
        forward, time_us = fused, fused_us
    return replace(parts, forward=forward)


def _is_waited_for(node: Node) -> bool:
    return collective_of(node) in ("all_gather", "reduce_scatter") and not is_started(node)


def _rewritten(collective: Node, recomputed: Container[str] = ()) -> Graph:
    """Copy the graph with one operator in place of ``collective`` and the matmuls around it.

    Args:
        recomputed: names of nodes that backward recomputes.

    Raises:
        DeclinedError: there are no such matmuls, or they cannot be one operator.
    """
    placements = placements_of(collective)
    assert placements is not None
    is_gather = collective_of(collective) == "all_gather"
    rows = collective if is_gather else collective.args[0]
    in_rows = placements[0] == S(0) if is_gather else placements == (P, S(0))
    if not in_rows or rows.meta["val"].dim() != 2:
        raise DeclinedError("it does not move the same number of rows of a matrix for each rank")
    if any(node.target in _PADDING for node in (rows, *collective.users)):
        raise DeclinedError(
            "rows are padded, because their number may not be divisible by the number of ranks"
        )
    if example_number(rows.meta["val"].shape[0]) < LEAST_ROWS:
        raise DeclinedError(f"fewer than {LEAST_ROWS} rows are too few to multiply rank by rank")
    rewrite = _with_gather if is_gather else _with_scatter
    return rewrite(collective, recomputed)


class _Copy:
    """A copy of a graph in the making.

    Attributes:
        graph: the copy.
        of: nodes of the original to those that have their values.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.of: dict[Node, Node] = {}

    def add(self, nodes: Iterable[Node]) -> None:
        """Copy those of ``nodes`` that have no counterpart yet."""
        for node in nodes:
            if node not in self.of:
                self.of[node] = self.graph.node_copy(node, self.of.__getitem__)

    def put(self, node: Node, target: Any, args: tuple[Any, ...]) -> None:
        """Compute the value of ``node`` by a call of ``target``."""
        self.of[node] = make_like(
            self.graph, target, args, like=node, origin=_ORIGIN, name=node.name
        )

    def call(self, target: Any, args: tuple[Any, ...], *, like: Node, name: str) -> Node:
        """Call ``target`` for a value that the original does not have."""
        return make_call(self.graph, target, args, like=like, origin=_ORIGIN, name=name)

    def factor(self, product: _Product) -> Node:
        """Return the right factor as ``mm`` takes it."""
        right = self.of[product.right]
        if product.node.target is not aten.linear.default:
            return right
        return self.call(aten.t.default, (right,), like=right, name=f"{right.name}_t")


def _with_gather(gather: Node, recomputed: Container[str]) -> Graph:
    products = [product for user in gather.users if (product := _Product.of(user)) is not None]
    products = [each for each in products if each.left is gather and _can_precede(each, gather)]
    if not products:
        raise DeclinedError("no matmul with a weight reads the gathered value")
    products = [each for each in products if each.node.name not in recomputed]
    if not products:
        raise DeclinedError(_RECOMPUTED)
    copy, nodes = _Copy(), list(gather.graph.nodes)
    copy.add(nodes[: nodes.index(gather)])
    # The operators that compute a factor, such as a cast to 16 bits, may come after the gather.
    needed = ancestors(operand for product in products for operand in product.weights)
    copy.add(node for node in nodes if node in needed)
    factors = list(map(copy.factor, products))
    args = copy.of[gather.args[0]], factors, arguments(gather)["world_size"]
    target, name = ALL_GATHER_MATMUL.overload, f"{gather.name}_products"
    fused = copy.call(target, args, like=products[0].node, name=name)
    if len(gather.users) > len(products):
        copy.put(gather, operator.getitem, (fused, 0))
    for index, product in enumerate(products, 1):
        part = operator.getitem, (fused, index)
        if product.bias is None:
            copy.put(product.node, *part)
        else:
            name = f"{product.node.name}_without_bias"
            own = copy.call(*part, like=product.node, name=name)
            copy.put(product.node, aten.add.Tensor, (own, copy.of[product.bias]))
    copy.of.setdefault(gather, fused)  # without readers
    copy.add(nodes)
    return copy.graph


def _can_precede(product: _Product, gather: Node) -> bool:
    """Return whether weight and bias can be computed before ``gather``: from inputs, by operators
    that may be reordered with others."""
    before = ancestors(product.weights)
    return gather not in before and not any(draws(node) or writes(node) for node in before)


def _with_scatter(scatter: Node, recomputed: Container[str]) -> Graph:
    product = _Product.of(scatter.args[0])
    if product is None or product.bias is not None:
        raise DeclinedError("the value summed over the ranks is not the matmul of two matrices")
    if len(product.node.users) > 1:
        raise DeclinedError("the value summed over the ranks has other readers before the sum")
    if scatter.name in recomputed:
        raise DeclinedError(_RECOMPUTED)
    copy, nodes = _Copy(), list(scatter.graph.nodes)
    copy.add(node for node in nodes[: nodes.index(scatter)] if node is not product.node)
    args = copy.of[product.left], copy.factor(product), arguments(scatter)["world_size"]
    copy.put(scatter, MATMUL_REDUCE_SCATTER.overload, args)
    copy.add(nodes[nodes.index(scatter) :])
    return copy.graph
