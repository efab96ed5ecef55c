"""The experts of a model, recognised by how their parameters are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.ir.fx import arguments, is_call, is_getitem, shape_of
from sp_compiler.ir.op_traits import is_grouped_product

HOW = (
    "To be divided, experts must be a parameter with a matrix per expert that is a factor of "
    "grouped matmuls, or that is indexed by the expert of each row, as w[ids] with ids of one dim "
    '(in transformers: model.set_experts_implementation("grouped_mm"))'
)
_aten = torch.ops.aten
SORTS = (_aten.sort.stable, _aten.argsort.stable)  # normalized graphs have no others


@dataclass(frozen=True)
class Use:
    """A grouped matmul, or the choice of a row's expert: ``node`` reads the parameter ``weight``
    through the calls ``views``."""

    node: Node
    weight: Node
    views: tuple[Node, ...]

    @property
    def is_product(self) -> bool:
        return is_grouped_product(self.node)


@dataclass
class Layer:
    """Experts of one layer.

    Attributes:
        routing: end offsets of the rows of each expert, or the expert of each row.
        ids: the expert of each row, if any use picks by it.
        uses: matmuls in graph order, then choices.
    """

    routing: Node
    ids: Node | None = None
    uses: list[Use] = field(default_factory=list)


def layers_of(graph: Graph, names: dict[Node, str]) -> list[Layer]:
    """Return the experts of ``graph``, whose parameters have ``names``."""
    layers: dict[Node, Layer] = {}
    picks: list[Use] = []
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in places:
        if is_grouped_product(node) and len(shape_of(node)) == 2:
            use = _use(node, node.args[1], names)
            if use is not None:
                ends = arguments(node)["offs"]
                layers.setdefault(ends, Layer(ends)).uses.append(use)
        elif picked_rows(node) is not None:
            use = _use(node, node.args[0], names)
            if use is not None:
                picks.append(use)
    for use in picks:
        ids = picked_rows(use.node)
        assert ids is not None
        of_products = [
            layer
            for ends, layer in layers.items()
            # Rows are routed once their ends are known.
            if places[ends] < places[use.node] and _counts(ends, ids)
        ]
        # Picking a vector per row may be any lookup: it is one of experts only if it belongs to
        # matrices of experts.
        if of_products:
            of_products[0].ids = ids
            of_products[0].uses.append(use)
        elif ids in layers or len(shape_of(use.weight)) > 2:
            layers.setdefault(ids, Layer(ids, ids)).uses.append(use)
    return list(layers.values())


def _use(node: Node, factor: Node, names: dict[Node, str]) -> Use | None:
    views = []
    while _keeps_first_dim(factor):
        views.append(factor)
        factor = factor.args[0]
    return Use(node, factor, tuple(reversed(views))) if factor in names else None


def _keeps_first_dim(node: Node) -> bool:
    num_dims = len(shape_of(node))
    if is_call(node, _aten.transpose.int):
        return all(dim % num_dims for dim in node.args[1:])
    if is_call(node, _aten.permute.default):
        return node.args[1][0] % num_dims == 0
    if is_call(node, _aten.slice.Tensor):
        return arguments(node)["dim"] % num_dims != 0
    return is_call(node, _aten._to_copy.default)


def picked_rows(node: Node) -> Node | None:
    """Return the computed ``ids``, of one dim, of ``x[ids]`` or ``x.index_select(0, ids)``."""
    if is_call(node, _aten.index.Tensor):
        ids, is_of_rows = node.args[1][0], len(node.args[1]) == 1
    elif is_call(node, _aten.index_select.default):
        _, dim, ids = node.args
        is_of_rows = dim in (0, -len(shape_of(node)))
    else:
        return None
    is_computed = is_of_rows and isinstance(ids, Node) and ids.op == "call_function"
    return ids if is_computed and len(shape_of(ids)) == 1 else None


def _counts(ends: Node, ids: Node) -> bool:
    """Whether ``ends`` are the ends of each expert's rows among ``ids``."""
    # Counts are the same in any order, and the matmuls' rows are sorted by expert.
    ids = uncast(ids)
    return counted_ids(ends) is ids and sort_of(ids) is not None


def counted_ids(ends: Node) -> Node | None:
    """Return the expert of each row, if ``ends`` are the end offsets of the experts' rows."""
    ends = uncast(ends, is_whole=True)
    if not is_call(ends, _aten.cumsum.default):
        return None
    counted = uncast(ends.args[0], is_whole=True)
    if not is_call(counted, _aten.histc.default):
        return None
    given = arguments(counted)
    (experts,) = shape_of(ends)
    is_by_number = (given["bins"], given["min"], given["max"]) == (experts, 0, experts - 1)
    return uncast(counted.args[0]) if is_by_number else None


def sort_of(ids: Node) -> Node | None:
    """Return the ascending sort whose sorted keys ``ids`` are, if there is one."""
    if is_getitem(ids):
        return ids.args[0] if ids.args[1] == 0 and _sorts(ids.args[0]) else None
    order: Any = picked_rows(ids)
    if order is not None and is_getitem(order):
        order = order.args[0] if order.args[1] == 1 else None
    return order if _sorts(order) and ids.args[0] is order.args[0] else None


def _sorts(node: Any) -> bool:
    return is_call(node, *SORTS) and not arguments(node)["descending"]


def uncast(node: Node, *, is_whole: bool = False) -> Node:
    """Return the value before casts that preserve the numbers of experts or rows.

    Args:
        is_whole: whether the values are integers in any type.
    """
    while is_call(node, _aten._to_copy.default):
        source, target = node.args[0].meta["val"], node.meta["val"].dtype
        truncates = source.is_floating_point() and not is_whole
        # float32 represents all of them up to 2 ** 24.
        if target not in (torch.float32, torch.float64) and (
            truncates or target not in (torch.int32, torch.int64)
        ):
            break
        node = node.args[0]
    return node
