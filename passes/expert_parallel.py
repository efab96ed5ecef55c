"""Divide the experts of every layer over the ranks of the axis "ep".

::

    y = grouped_mm(x, w, ends)         # x (s, k): rows by expert, w (e, k, n)
    -->
    splits, order, places, experts, own_ends = expert_routes(ends, s, n_ep)
    x_1 = expert_dispatch(x, splits, order, places)      # (s * n_ep, k): the rows of w's experts
    y_1 = grouped_mm(x_1, w, own_ends)                   # w (e / n_ep, k, n): this rank's experts
    y = expert_combine(y_1, splits, order, places)       # (s, n)

The parameters with a matrix (or a vector) per expert are recognised by their use: as the factors of
grouped products, or picked by the expert of each row (``w[ids]``). What lies between the first such
use and the last one is computed row by row, which the sharding rules prove, and runs on the rows
that were sent here; nothing else changes. Weights of the router are multiplied to what comes back,
so the router's gradient is that of its own rows.

Rows of other ranks are behind this rank's program, not part of it: a layer computes on ``s * n_ep``
rows, of which the last ones are zeros, for as many as all ranks have may come. Their results are
dropped, and their gradients are zeros. Requires and preserves normal form.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.errors import ArgumentError, PassError, UnsupportedError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import (
    ancestors,
    arguments,
    descendants,
    is_call,
    is_getitem,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.op_traits import is_grouped_product
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
from sp_compiler.rules.table import rule_for

_ORIGIN = Pass.EXPERT_PARALLEL
_aten = torch.ops.aten
# What a weight may go through without its first dim being touched.
_OF_WEIGHTS = (_aten.transpose.int, _aten.permute.default, _aten._to_copy.default)
_SIZED = (_aten.reshape.default, _aten.expand.default)
_HOW = (
    "Experts that are divided are a parameter with a matrix per expert, the factor of grouped "
    "products or picked by the expert of each row (in transformers: "
    'model.set_experts_implementation("grouped_mm"))'
)


def expert_parallel(captured: Captured, num_ranks: int) -> None:
    """Divide the experts of ``captured`` over ``num_ranks`` ranks, in place.

    Parameters of experts get the shape of one rank's part, and are listed in
    ``captured.experts``.

    Raises:
        UnsupportedError: no experts, or experts in a form that cannot be divided.
        ArgumentError: a number of experts that the ranks do not divide.
    """
    graph = captured.module.graph
    names = {
        node: ref.name
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if ref.kind == "param"
    }
    layers = _layers(graph, names)
    if not layers:
        raise UnsupportedError(_none_found(captured))
    weights = dict.fromkeys(use.weight for layer in layers for use in layer.uses)
    for weight in weights:
        _divide(weight, names[weight], layers, num_ranks)
    for layer in layers:
        _Rewrite(layer, num_ranks).run()
    captured.experts = tuple(names[weight] for weight in weights)
    graph.lint()


# What is divided.


@dataclass(frozen=True)
class _Use:
    """A grouped product, or the choice of a row's expert: ``node`` reads the parameter ``weight``
    through the calls ``views``."""

    node: Node
    weight: Node
    views: tuple[Node, ...]

    @property
    def is_product(self) -> bool:
        return is_grouped_product(self.node)


@dataclass
class _Layer:
    """Experts of one layer.

    Attributes:
        routing: ends of the rows of each expert, or the expert of each row.
        ids: the expert of each row, if any use picks by it.
        uses: in graph order.
    """

    routing: Node
    ids: Node | None = None
    uses: list[_Use] = field(default_factory=list)


def _layers(graph: Graph, names: dict[Node, str]) -> list[_Layer]:
    layers: dict[Node, _Layer] = {}
    picks: list[_Use] = []
    for node in graph.nodes:
        if is_grouped_product(node) and len(shape_of(node)) == 2:
            use = _use(node, node.args[1], names)
            if use is not None:
                ends = arguments(node)["offs"]
                layers.setdefault(ends, _Layer(ends)).uses.append(use)
        elif is_call(node, _aten.index.Tensor) and _picks_rows(node):
            use = _use(node, node.args[0], names)
            if use is not None:
                picks.append(use)
    for use in picks:
        ids = use.node.args[1][0]
        of_products = [layer for ends, layer in layers.items() if _counts(ends, ids)]
        # A vector per row is any lookup; of experts only beside their matrices.
        if of_products:
            of_products[0].ids = ids
            of_products[0].uses.append(use)
        elif ids in layers or len(shape_of(use.weight)) > 2:
            layers.setdefault(ids, _Layer(ids, ids)).uses.append(use)
    return list(layers.values())


def _use(node: Node, factor: Node, names: dict[Node, str]) -> _Use | None:
    views = []
    while is_call(factor, *_OF_WEIGHTS) and shape_of(factor)[0] == shape_of(factor.args[0])[0]:
        views.append(factor)
        factor = factor.args[0]
    return _Use(node, factor, tuple(reversed(views))) if factor in names else None


def _picks_rows(node: Node) -> bool:
    """Whether it is ``w[ids]``, with computed ``ids`` of one dim."""
    indices = node.args[1]
    return (
        len(indices) == 1
        and isinstance(indices[0], Node)
        and indices[0].op == "call_function"
        and len(shape_of(indices[0])) == 1
    )


def _counts(ends: Node, ids: Node) -> bool:
    """Whether ``ends`` are sums of how often each expert is among ``ids``."""
    if not is_call(ends, _aten.cumsum.default):
        return False
    counted = _uncast(ends.args[0])
    if not is_call(counted, _aten.histc.default):
        return False
    given = arguments(counted)
    bins = given["bins"], given["min"], given["max"]
    return _uncast(counted.args[0]) is ids and bins == (shape_of(ends)[0], 0, bins[0] - 1)


def _uncast(node: Node) -> Node:
    return node.args[0] if is_call(node, _aten._to_copy.default) else node


def _none_found(captured: Captured) -> str:
    stacked = [name for name, (_, shape) in captured.parameters.items() if len(shape) == 3]
    named = [name for name in captured.parameters if "expert" in name]
    where = next(iter([*stacked, *named]), None)
    found = (
        "the model has no experts: leave the axis out"
        if where is None
        else f"the experts of module {where.rpartition('.')[0]!r} are computed in another way"
    )
    return f'the mesh has an axis "ep", which divides experts, and {found}. {_HOW}'


def _divide(weight: Node, name: str, layers: Sequence[_Layer], num_ranks: int) -> None:
    """Give ``weight`` the shape of one rank's part."""
    uses = [use for layer in layers for use in layer.uses if use.weight is weight]
    views = dict.fromkeys(view for use in uses for view in use.views)
    known = {*views, *(use.node for use in uses)}
    for user in (user for node in (weight, *views) for user in node.users):
        if user not in known:
            raise UnsupportedError(
                f"the experts of parameter {name!r} cannot be divided over {num_ranks} ranks: "
                f"{user.name} reads all of them. {_HOW}\n{node_origin(user)}"
            )
    shape = shape_of(weight)
    if shape[0] % num_ranks:
        raise ArgumentError(
            f"mesh: {shape[0]} experts of parameter {name!r} are not divisible by the {num_ranks} "
            'ranks of the axis "ep"'
        )
    with fake_mode_of(weight.graph):
        weight.meta["val"] = weight.meta["val"].new_empty((shape[0] // num_ranks, *shape[1:]))
    for view in views:
        refake(view)


# How it is computed.


class _Rewrite:
    """The rewrite of one layer's experts."""

    def __init__(self, layer: _Layer, num_ranks: int) -> None:
        self._layer = layer
        self._num_ranks = num_ranks
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
            # -1 behind the last row, where any expert will do.
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
        for node in inside:
            if node in self._uses and self._by_end and not self._uses[node].is_product:
                self._mask(node)
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
                    f"{node.name}, between products of experts, is not known to compute each row "
                    f"by itself: its rows cannot be sent to other ranks. {_HOW}\n"
                    f"{node_origin(node)}"
                )
            # Behind the last product what reads nothing but its rows goes along: a bias, a cast.
            if rows is not None and (node in between or not rows):
                inside[node] = rows
        return inside

    def _first_reads(self) -> Iterator[Node]:
        """Yield the calls that bring what is picked for a row together with the row."""
        for use in self._layer.uses:
            picked = [] if use.is_product else [use.node]
            for node in picked:  # which grows
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
        rows = {dims[0] for operand, dims in operands if operand in inside}
        factor = next(iter(rows))[:1]
        mixed = (*rule.contracted, *rule.averaged)
        if len(rows) > 1 or rows != {factor} or not factor or factor[0] in mixed:
            return None
        every = [*(dims for _, dims in operands), *rule.results]
        with_rows = [dims for dims in every if any(factor[0] in dim for dim in dims)]
        if factor[0].blocked or any(
            dims[0] != factor or any(factor[0] in dim for dim in dims[1:]) for dims in with_rows
        ):
            return None
        if any(dims not in with_rows for dims in rule.results):
            return None
        return [x for x, dims in operands if x not in inside and dims in with_rows]

    def _dispatched(self, rows: Node, user: Node) -> Node:
        if rows not in self._sent:
            target = EXPERT_DISPATCH.overload
            self._sent[rows] = insert_call(user, target, (rows, *self._route), origin=_ORIGIN)
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

    def _mask(self, node: Node) -> None:
        """Make what is picked zero behind the last row.

        Grouped products leave the rows there as they find them, in gradients too, and the gradient
        of a choice is summed over all rows.
        """
        ones = [1] * (len(shape_of(node)) - 1)
        users = list(node.users)
        is_row = self._behind(node, _aten.ge.Scalar, self._experts, 0)
        is_row = self._behind(is_row, _aten.reshape.default, is_row, [shape_of(node)[0], *ones])
        masked = self._behind(is_row, _aten.where.ScalarOther, is_row, node, 0)
        self._made[masked] = None
        for user in users:
            user.replace_input_with(node, masked)

    def _behind(self, anchor: Node, target: Any, *args: Any) -> Node:
        """A call behind ``anchor``, in its module."""
        value, requires_grad = differentiable_result(fake_mode_of(self._graph), target, args, {})
        with self._graph.inserting_after(anchor):
            return make_call(
                self._graph, target, args, like=anchor, origin=_ORIGIN,
                name=target.__name__.split(".")[0],
                meta={"val": value, "requires_grad": requires_grad},
            )  # fmt: skip
