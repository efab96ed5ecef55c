"""The calls of a layer's experts on the rows that their rank computes."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from sp_compiler.base.errors import PassError, UnsupportedError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.fx import (
    ancestors,
    descendants,
    is_call,
    is_getitem,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.rewriting import (
    differentiable_result,
    fake_mode_of,
    insert_call,
    make_call,
    refake,
)
from sp_compiler.ops.expert_rows import (
    EXPERT_COMBINE,
    EXPERT_DISPATCH,
    EXPERT_ROUTES,
    EXPERT_ROUTES_BY_ID,
)
from sp_compiler.passes.expert_parallel.layers import HOW, Layer
from sp_compiler.rules.table import rule_for

_ORIGIN = Pass.EXPERT_PARALLEL
_aten = torch.ops.aten
_SIZED = (_aten.reshape.default, _aten.expand.default)


class Rewrite:
    """The rewrite of one layer's experts.

    Args:
        layer: the experts.
        num_ranks: number of ranks that divide them.
        varying: values that differ from rank to rank.
    """

    def __init__(self, layer: Layer, num_ranks: int, varying: Container[Node]) -> None:
        self._layer = layer
        self._num_ranks = num_ranks
        self._varying = varying
        self._uses = {use.node: use for use in layer.uses}
        first = layer.uses[0]
        self._graph = first.node.graph
        self._rows = shape_of(first.node)[0]
        self._sent: dict[Node, Node] = {}  # rows of this rank to those that it computes
        self._made: dict[Node, None] = {}
        routing = layer.routing
        if self._by_end:
            target, args = EXPERT_ROUTES.overload, (self._rows, num_ranks)
        else:
            num_experts = shape_of(first.weight)[0] * num_ranks
            target, args = EXPERT_ROUTES_BY_ID.overload, (num_experts, num_ranks)
        routes = self._behind(routing, target, routing, *args)
        *route, experts, ends = (
            self._behind(routes, operator.getitem, routes, index) for index in range(5)
        )
        self._route = (*route, num_ranks)
        self._experts = experts
        self._own = {routing: ends} if self._by_end else {}
        if layer.ids is not None:
            # -1 after the last row, where any expert will do.
            self._own[layer.ids] = self._behind(experts, _aten.clamp.default, experts, 0)

    @property
    def _by_end(self) -> bool:
        return self._layer.routing is not self._layer.ids

    def run(self) -> None:
        """Rewrite the layer."""
        inside = self._inside()
        for node, rows in inside.items():
            taken = {**self._own, **{each: self._dispatched(each, node) for each in rows}}
            node.args = map_arg(node.args, lambda x, taken=taken: taken.get(x, x))
            node.kwargs = map_arg(node.kwargs, lambda x, taken=taken: taken.get(x, x))
            self._resize(node)
        if self._by_end:
            for node in [each for each in inside if self._sums_over_rows(each, inside)]:
                self._mask(node, inside)
        for node in inside:
            behind = [user for user in node.users if user not in inside and user not in self._made]
            if behind:
                combine = EXPERT_COMBINE.overload
                combined = self._behind(node, combine, node, *self._route)
                for user in behind:
                    user.replace_input_with(node, combined)
        report_of(_ORIGIN).rewrote(kind="layer of experts")

    def _inside(self) -> dict[Node, list[Node]]:
        """Return the calls that run on the rows of this rank's experts, in graph order, each with
        the operands that have to be sent there."""
        between = descendants(self._uses) & ancestors([*self._uses, *self._first_reads()])
        inside: dict[Node, list[Node]] = {}
        for node in self._graph.nodes:
            if node.op != "call_function":
                continue
            if node not in between and not any(x in inside for x in node.all_input_nodes):
                continue
            rows = self._rows_of(node, inside)
            if node in between and rows is None:
                raise UnsupportedError(
                    f"{node.name}, between matmuls of experts, is not known to compute each row "
                    "only from that row and parameters: its rows cannot be sent to other ranks. "
                    f"{HOW}\n{node_origin(node)}"
                )
            # After the last matmul, an operator that reads only its rows (a bias, a cast) is
            # included.
            if rows is not None and (node in between or not rows):
                inside[node] = rows
        return inside

    def _first_reads(self) -> Iterator[Node]:
        """Yield the calls that combine what is picked for a row with the row."""
        for use in self._layer.uses:
            picked = [] if use.is_product else [use.node]
            for node in picked:  # the list grows
                for user in node.users:
                    if len(user.all_input_nodes) == 1:
                        picked.append(user)
                    else:
                        yield user

    def _rows_of(self, node: Node, inside: Container[Node]) -> list[Node] | None:
        """Return the operands of ``node`` that have rows and come from outside; ``None`` if it is
        not proven to compute row by row."""
        if node in self._uses:
            x = node.args[0]
            return [x] if self._uses[node].is_product and x not in inside else []
        if is_getitem(node):
            return []
        rule = rule_for(node)
        if rule is None:
            return None
        operands = list(zip(tensor_operands(node), rule.operands, strict=True))
        # Not a set: factors with open sizes cannot be hashed.
        rows = [dims[0] for operand, dims in operands if operand in inside]
        factor = rows[0][:1]
        mixed = (*rule.contracted, *rule.averaged)
        if any(each != factor for each in rows) or not factor or factor[0] in mixed:
            return None
        every = [*(dims for _, dims in operands), *rule.results]
        with_rows = [dims for dims in every if any(factor[0] in dim for dim in dims)]
        if factor[0].blocked or any(
            dims[0] != factor or any(factor[0] in dim for dim in dims[1:]) for dims in with_rows
        ):
            return None
        if any(dims not in with_rows for dims in rule.results):
            return None
        # On the rank that a row is sent to, values that depend on the batch differ.
        if any(x in self._varying and dims not in with_rows for x, dims in operands):
            return None
        return [x for x, dims in operands if x not in inside and dims in with_rows]

    def _dispatched(self, rows: Node, user: Node) -> Node:
        if rows not in self._sent:
            target = EXPERT_DISPATCH.overload
            sent = insert_call(user, target, (rows, *self._route), origin=_ORIGIN)
            # All rows are computed: zeros would become NaN if a row is divided by its norm, and so
            # would the gradient of the expert that they are assigned to.
            fill = not self._by_end and sent.meta["val"].is_floating_point()
            self._sent[rows] = self._masked(sent, 1) if fill else sent
        return self._sent[rows]

    def _resize(self, node: Node) -> None:
        """Make ``node``, whose operands have changed, compute the rows of all ranks."""
        before, room = node.meta["val"], self._rows * self._num_ranks
        if is_call(node, *_SIZED):
            (x, sizes) = node.args
            node.args = x, [room, *sizes[1:]]
        refake(node)
        old, new = ([v] if isinstance(v, Tensor) else v for v in (before, node.meta["val"]))
        shapes = [(room, *value.shape[1:]) for value in old]
        if [tuple(value.shape) for value in new] != shapes:
            raise PassError(_ORIGIN, f"rows of all ranks make {new}, expected {shapes}", node)

    def _sums_over_rows(self, node: Node, inside: Container[Node]) -> bool:
        """Whether a gradient of ``node`` is a sum over rows, other than by a grouped matmul."""
        if node in self._uses and self._uses[node].is_product:
            return False
        sent = self._sent.values()
        others = (x for x in node.all_input_nodes if x not in inside and x not in sent)
        return any(x.meta["requires_grad"] for x in others)

    def _mask(self, node: Node, inside: Container[Node]) -> None:
        """Make the operands and results of ``node`` zero after the last row.

        Grouped matmuls leave the rows there uninitialized, in gradients too.
        """
        for x in [x for x in node.all_input_nodes if x in inside]:
            if x.meta["val"].is_floating_point():
                node.replace_input_with(x, self._masked(x, 0))
        users = [user for user in node.users if user in inside]
        if users:
            masked = self._masked(node, 0)
            for user in users:
                user.replace_input_with(node, masked)

    def _masked(self, node: Node, other: int) -> Node:
        """``node``, with ``other`` after the last row."""
        ones = [1] * (len(shape_of(node)) - 1)
        is_row = self._behind(node, _aten.ge.Scalar, self._experts, 0)
        is_row = self._behind(is_row, _aten.reshape.default, is_row, [shape_of(node)[0], *ones])
        masked = self._behind(is_row, _aten.where.ScalarOther, is_row, node, other)
        self._made[masked] = None
        return masked

    def _behind(self, anchor: Node, target: Any, *args: Any) -> Node:
        """A call right after ``anchor``, in its module."""
        value, requires_grad = differentiable_result(fake_mode_of(self._graph), target, args, {})
        with self._graph.inserting_after(anchor):
            return make_call(
                self._graph, target, args, like=anchor, origin=_ORIGIN,
                name=target.__name__.split(".")[0],
                meta={"val": value, "requires_grad": requires_grad},
            )  # fmt: skip
