"""Placements of the results of one operator from those of its operands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import P, Placement, R, S, Segmentation, as_value
from sp_compiler.check.shapes import (
    NO_SUCH_CALL,
    GlobalCall,
    Shape,
    global_calls,
    global_shape,
    local_shapes,
)
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.op_traits import FILLED, RESHAPES, draws, writes
from sp_compiler.ir.rewriting import make_call
from sp_compiler.ops.registry import operator_of
from sp_compiler.rules.factors import OpRule, reshaped
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.table import rule_for

aten = torch.ops.aten
Results = tuple[Placement, ...]
"""Placements of all results of one operator."""

# The gradient of a sum is expanded to the size of the dim that was summed. If each rank has one
# element of that dim, nothing is expanded: a replicated value with a new dim of size 1 is then a
# row of copies, one per rank.
_MAKE_DIMS = (aten.unsqueeze.default, aten.reshape.default, aten.view.default)
_EXPANDS = (aten.expand.default, aten.broadcast_to.default)


def derive(node: Node, operands: Sequence[Placement], world_size: int) -> list[Results]:
    """Return all placements that describe the results; if there are none, the operator is rejected.

    Several placements are returned only if all are true: a constant is equal on every rank and also
    a shard of itself; a view may assign a sharded dim of local size 1 to either neighbour. The
    simplest comes first.

    Args:
        operands: placements of the tensor operands as values, see
            :func:`~sp_compiler.base.placement.as_value`.
    """
    num_results = len(local_shapes(node))
    if node.target in FILLED:
        return _constant(node)
    declared = declared_strategies(node, world_size)
    if declared is not None:
        if writes(node):
            declared = [*declared, *_in_segments(declared, operands)]
        return _matching(declared, operands, num_results, world_size)
    # Each rank draws different random numbers: no placement describes them.
    if draws(node):
        return []
    replicated = all(placement == R for placement in operands)
    # Equal operands give the same result on every rank, whether or not there is a rule.
    possible = [(R,) * num_results] if replicated else []
    if replicated and node.target in _MAKE_DIMS:
        (shape,) = local_shapes(node)
        possible += [(S(dim),) for dim, size in enumerate(shape or ()) if size == 1]
    # Only an expansion makes shards from replicated values: rules are not asked about others.
    if not replicated or node.target in _EXPANDS:
        possible += _sharded(node, operands, world_size)
    # Without segments first: if a plain shard explains the node, segments are not considered.
    return sorted(
        dict.fromkeys(possible), key=lambda results: sum(len(p.segments) for p in results)
    )


def declared_strategies(node: Node, world_size: int) -> list[Strategy] | None:
    """Return all strategies of one of the compiler's operators; ``None`` for any other.

    The typings of our operators are trusted, and verified by numeric tests of each operator. An
    empty list means that the arguments contradict each other.
    """
    ours = operator_of(node.target)
    if ours is None:
        return None
    args = arguments(node)
    if not ours.takes_world_size and args["world_size"] != world_size:
        return []
    return [Strategy(*typing) for typing in ours.typings(args, world_size)]


def _in_segments(ways: Sequence[Strategy], operands: Sequence[Placement]) -> Iterator[Strategy]:
    """Yield ``ways`` of an operator that writes, with the segments of ``operands``.

    Its typings cannot name these. Each of them shards one dim alone, which the total and what is
    written have in common: in whatever segments, if all have the same.
    """
    for segments in dict.fromkeys(each.segments for each in operands if each.segments):

        def cut(placements: Sequence[Placement], segments: tuple[int, ...] = segments) -> Results:
            return tuple(
                replace(each, segments=segments) if each.is_sharded else each for each in placements
            )

        yield from (Strategy(cut(way.operands), cut(way.results)) for way in ways)


def allowed(node: Node, operands: Sequence[Placement], world_size: int) -> list[Strategy]:
    """Return the strategies of ``node`` for operands of these shapes, for an error message."""
    declared = declared_strategies(node, world_size)
    if declared is not None:
        return [_valued(way, world_size) for way in declared]
    possible = [] if draws(node) else [Strategy((R,) * len(operands), (R,))]
    for shadow, _ in _shadows(node, operands, world_size):
        possible += _offered(shadow, operands, world_size)
    return list(dict.fromkeys(_valued(way, world_size) for way in possible))


def _constant(node: Node) -> list[Results]:
    """Return every placement of a tensor that is filled with one number."""
    (shape,) = local_shapes(node)
    value = FILLED[node.target]
    value = arguments(node)[value] if isinstance(value, str) else value
    # All parts of a tensor of one number are equal. Only zeros are also the summands of a sum that
    # is the same number.
    shards = [(S(dim),) for dim in range(len(shape or ()))]
    return [(R,), *shards, *([(P,)] if value == 0 else [])]


def _sharded(node: Node, operands: Sequence[Placement], world_size: int) -> list[Results]:
    """Return the placements that the rule table derives, confirmed by the sizes on this rank."""
    # A rule may offer strategies that these sizes contradict: of several possible global shapes,
    # the right one has parts with the sizes of this rank's results.
    local = local_shapes(node)
    confirmed: list[Results] = []
    for shadow, shapes in _shadows(node, operands, world_size):
        offered = _offered(shadow, operands, world_size)
        for results in _matching(offered, operands, len(local), world_size):
            if all(
                part is None or (shape is not None and _part(shape, placement, world_size) == part)
                for part, shape, placement in zip(local, shapes, results, strict=True)
            ):
                confirmed.append(results)
    return confirmed


def _shadows(
    node: Node, operands: Sequence[Placement], world_size: int
) -> Iterator[tuple[Node, list[Shape | None]]]:
    """Yield copies of ``node`` on global tensors, with the global shapes of their results."""
    values = []
    for operand, placement in zip(tensor_operands(node), operands, strict=True):
        value = operand.meta["val"]
        if isinstance(value, Tensor):
            shape = global_shape(value.shape, placement, world_size)
            value = torch.empty(shape, dtype=value.dtype, device="meta")
        values.append(value)
    try:
        calls = list(global_calls(node, values, operands, world_size))
    except NO_SUCH_CALL:
        return
    for call in calls:
        # Of other global sizes a split may have another number of parts than on one rank.
        if len(call.shapes) == len(local_shapes(node)):
            yield _shadow(node, values, call), call.shapes


def _shadow(node: Node, values: Sequence[Any], call: GlobalCall) -> Node:
    """Build a node for ``call``: rules take nodes and read shapes from their meta."""
    graph = Graph()
    operands = iter(values)

    def placeholder(original: Node) -> Node:
        new = graph.placeholder(original.name)
        new.meta["val"] = next(operands)
        return new

    args, kwargs = map_arg((call.args, call.kwargs), placeholder)

    value = node.meta["val"]
    locals_ = value if isinstance(value, (tuple, list)) else [value]
    globals_ = [
        torch.empty(shape or (), dtype=item.dtype, device="meta")
        if isinstance(item, Tensor)
        else item
        for item, shape in zip(locals_, call.shapes, strict=True)
    ]
    meta = {"val": globals_ if isinstance(value, (tuple, list)) else globals_[0]}
    if "placement" in node.meta:
        meta["placement"] = node.meta["placement"]
    return make_call(graph, node.target, args, kwargs, like=node, origin=Pass.CHECK, meta=meta)


def _offered(shadow: Node, operands: Sequence[Placement], world_size: int) -> list[Strategy]:
    """Return all strategies that the rule allows for ``shadow``, not only those worth offering."""
    try:
        rule = rule_for(shadow)
    except (ArgumentError, RuntimeError):  # incompatible shapes
        return []
    if rule is None:
        return []
    # The placement that sharding declared is tried here, not believed. Its segments are known from
    # nowhere else if only the result has the dim.
    claim = as_value(shadow.meta.get("placement", R), world_size)
    cuts = dict.fromkeys(Segmentation(p.segments) for p in (*operands, claim) if p.segments)
    # Every dim may be sharded, and rows form has become S(0) by now: the check asks what is
    # correct, not what is worthwhile.
    offers = Offers(
        world_size=world_size,
        shardable=lambda factor: True,
        segmentations=lambda factor: list(cuts),
        operand_rows=(),
        result_rows=(),
        sequence_parallel=False,
    )
    offered = strategies(rule, len(rule.operands), len(rule.results), offers)
    # The other lowerings have become other operators, which have their own types.
    offered = [strategy for strategy in offered if strategy.lowering == "itself"]
    cut_again = [*_reshaped_segments(shadow, operands, offers), *_merged_segments(shadow, operands)]
    return [*offered, *_concatenated(shadow, world_size), *cut_again]


def _reshaped_segments(
    shadow: Node, operands: Sequence[Placement], offers: Offers
) -> list[Strategy]:
    """Return a reshape of a dim in equal segments, which are rows of an outer factor::

        (b h s, d) S(0|hs,hs) -> (b h, s, d) S(0|h,h)    for b = 2

    The rule treats ``b h`` as one factor if neither shape has ``b`` alone.
    """
    is_reshape = shadow.target in RESHAPES
    if not is_reshape or len(set(operands[0].segments)) != 1:
        return []
    (operand,), result = tensor_operands(shadow), tuple(shadow.meta["val"].shape)
    shape, dim, count = operand.meta["val"].shape, operands[0].dim, len(operands[0].segments)
    finer = (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    source, target = reshaped(finer, result)
    joined = (*source[:dim], (*source[dim], *source[dim + 1]), *source[dim + 2 :])
    rule = OpRule((joined,), (target,), rows="relabel")
    return strategies(rule, 1, 1, replace(offers, segmentations=lambda factor: []))


def _merged_segments(shadow: Node, operands: Sequence[Placement]) -> list[Strategy]:
    """Return the strategies of a reshape that merges later dims into a dim in any segments::

    (b, s, h, d) S(2|4,2,2) -> (b, s, h d) S(2|4d,2d,2d)
    """
    is_reshape = shadow.target in RESHAPES
    if not is_reshape or not operands[0].segments:
        return []
    shape, dim = tensor_operands(shadow)[0].meta["val"].shape, operands[0].dim
    source, target = reshaped(shape, tuple(shadow.meta["val"].shape))
    outer = source[dim]
    for merged, factors in enumerate(target):
        if factors[: len(outer)] == outer:
            inner = math.prod(factor.size for factor in factors[len(outer) :])
            segments = tuple(inner * size for size in operands[0].segments)
            return [Strategy((operands[0],), (S(merged, segments),))]
    return []


def _concatenated(shadow: Node, world_size: int) -> list[Strategy]:
    """Concatenation along the sharded dim, whose result has a segment per part."""
    # The rule blocks this dim: factors cannot express a result whose segments are the operands.
    if shadow.target is not aten.cat.default:
        return []
    dim = arguments(shadow)["dim"] % shadow.meta["val"].dim()
    parts = [operand.meta["val"] for operand in tensor_operands(shadow)]
    # Fewer dims: ``cat`` accepts an empty tensor of one dim among the others.
    sizes = tuple(part.shape[dim] for part in parts if part.dim() > dim)
    if len(sizes) < len(parts) or any(size % world_size for size in sizes):
        return []
    return [Strategy((S(dim),) * len(sizes), (S(dim, sizes),))]


def _matching(
    offered: Sequence[Strategy], operands: Sequence[Placement], num_results: int, world_size: int
) -> list[Results]:
    """Return the results of the strategies for exactly ``operands``; a placement that a rule omits
    is R."""
    results = []
    for strategy in (_valued(way, world_size) for way in offered):
        if strategy.operands == tuple(operands):
            padding = itertools.repeat(R, num_results - len(strategy.results))
            results.append((*strategy.results, *padding))
    return list(dict.fromkeys(results))


def _valued(strategy: Strategy, world_size: int) -> Strategy:
    """Return ``strategy`` with R instead of I: only placements of values are derived here."""
    operands = tuple(as_value(placement, world_size) for placement in strategy.operands)
    return Strategy(operands, tuple(as_value(result, world_size) for result in strategy.results))


def _part(shape: Shape, placement: Placement, world_size: int) -> Shape | None:
    # There are no parts if the shape is not divisible: the value cannot have this placement.
    try:
        return placement.local_shape(shape, world_size)
    except (ValueError, IndexError):
        return None
