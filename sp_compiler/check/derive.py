"""Placements of the results of one operator from those of its operands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import P, Placement, R, S, as_value
from sp_compiler.check.shapes import (
    NO_SUCH_CALL,
    GlobalCall,
    Shape,
    global_calls,
    global_shape,
    local_shapes,
)
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.op_traits import FILLED, draws
from sp_compiler.ir.rewriting import make_call
from sp_compiler.ops.registry import operator_of
from sp_compiler.rules.factors import OpRule
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.table import rule_for

aten = torch.ops.aten
Results = tuple[Placement, ...]
"""Placements of all results of one operator."""

# The gradient of a sum over a dim of which each rank has one element is expanded to that size, so
# not at all: with a new dim of size 1 a replicated value is also a row of copies, one a rank.
_MAKE_DIMS = (aten.unsqueeze.default, aten.reshape.default, aten.view.default)
_EXPANDS = (aten.expand.default, aten.broadcast_to.default)


def derive(node: Node, operands: Sequence[Placement], world_size: int) -> list[Results]:
    """Every placement that the results may be said to have; none: the operator is refused.

    More than one only where they tell the same truth: a constant is the same on every rank, and a
    shard of itself; a view may assign a sharded dim of local size 1 to either neighbour. The
    plainest comes first.

    Args:
        operands: placements of the tensor operands as values, see
            :func:`~sp_compiler.base.placement.as_value`.
    """
    num_results = len(local_shapes(node))
    if node.target in FILLED:
        return _constant(node)
    declared = declared_strategies(node, world_size)
    if declared is not None:
        return _matching(declared, operands, num_results)
    # Each rank draws numbers of its own: nothing true can be said of them.
    if draws(node):
        return []
    replicated = all(placement == R for placement in operands)
    found = [(R,) * num_results] if replicated else []
    if replicated and node.target in _MAKE_DIMS:
        (shape,) = local_shapes(node)
        found += [(S(dim),) for dim, size in enumerate(shape or ()) if size == 1]
    if not replicated or node.target in _EXPANDS:
        found += _sharded(node, operands, world_size)
    return sorted(dict.fromkeys(found), key=lambda results: sum(len(p.segments) for p in results))


def declared_strategies(node: Node, world_size: int) -> list[Strategy] | None:
    """Every way to run one of our own operators; ``None`` for any other.

    What our operators declare is trusted, so each has numeric tests of its own. An empty list: the
    arguments contradict each other.
    """
    ours = operator_of(node.target)
    if ours is None:
        return None
    args = arguments(node)
    if not ours.takes_world_size and args["world_size"] != world_size:
        return []
    return [Strategy(*typing) for typing in ours.typings(args, world_size)]


def allowed(node: Node, operands: Sequence[Placement], world_size: int) -> list[Strategy]:
    """What ``node`` could do with operands of these shapes, for the text of a refusal."""
    declared = declared_strategies(node, world_size)
    if declared is not None:
        return list(map(_valued, declared))
    found = [] if draws(node) else [Strategy((R,) * len(operands), (R,))]
    for shadow, _ in _shadows(node, operands, world_size):
        found += _offered(shadow, operands, world_size)
    return list(dict.fromkeys(map(_valued, found)))


def _constant(node: Node) -> list[Results]:
    (shape,) = local_shapes(node)
    value = FILLED[node.target]
    value = arguments(node)[value] if isinstance(value, str) else value
    # Zeros are also parts of a sum that is zero.
    shards = [(S(dim),) for dim in range(len(shape or ()))]
    return [(R,), *shards, *([(P,)] if value == 0 else [])]


def _sharded(node: Node, operands: Sequence[Placement], world_size: int) -> list[Results]:
    # A rule may offer what these sizes do not bear out: of several global shapes only one is meant,
    # and its parts are what the rank has.
    local = local_shapes(node)
    found: list[Results] = []
    for shadow, shapes in _shadows(node, operands, world_size):
        for results in _matching(_offered(shadow, operands, world_size), operands, len(local)):
            if all(
                part is None or (shape is not None and _part(shape, placement, world_size) == part)
                for part, shape, placement in zip(local, shapes, results, strict=True)
            ):
                found.append(results)
    return found


def _shadows(
    node: Node, operands: Sequence[Placement], world_size: int
) -> Iterator[tuple[Node, list[Shape | None]]]:
    """Copies of ``node`` on global tensors, with the global shapes of their results."""
    values = [
        _global_value(operand.meta["val"], placement, world_size)
        for operand, placement in zip(tensor_operands(node), operands, strict=True)
    ]
    try:
        calls = list(global_calls(node, values, operands, world_size))
    except NO_SUCH_CALL:
        return
    for call in calls:
        yield _shadow(node, values, call), call.shapes


def _global_value(value: Any, placement: Placement, world_size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = global_shape(value.shape, placement, world_size)
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _shadow(node: Node, values: Sequence[Any], call: GlobalCall) -> Node:
    graph = Graph()
    operands = iter(values)

    def placeholder(original: Node) -> Node:
        new = graph.placeholder(original.name)
        new.meta["val"] = next(operands)
        return new

    args, kwargs = tree_map_only(Node, placeholder, (call.args, call.kwargs))

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
    return make_call(graph, node.target, args, kwargs, like=node, origin="check", meta=meta)


def _offered(shadow: Node, operands: Sequence[Placement], world_size: int) -> list[Strategy]:
    try:
        rule = rule_for(shadow)
    except (ArgumentError, RuntimeError):  # these shapes do not go together
        return []
    if rule is None:
        return []
    claim = shadow.meta.get("placement", R)  # of a dim that only the result has
    segments = list(dict.fromkeys(p.segments for p in (*operands, claim) if p.segments))
    offers = Offers(
        world_size=world_size,
        shardable=lambda factor: True,
        segmentations=lambda factor: segments,
        operand_rows=(),
        result_rows=(),
        sequence_parallel=False,
    )
    found = strategies(rule, len(rule.operands), len(rule.results), offers)
    # The other lowerings are other operators by now, with types of their own.
    found = [strategy for strategy in found if strategy.lowering == "itself"]
    return [*found, *_joined(shadow, rule, world_size)]


def _joined(shadow: Node, rule: OpRule, world_size: int) -> list[Strategy]:
    """Parts that are sharded on the dim along which they are put together: one segment each."""
    if shadow.target is not aten.cat.default:
        return []
    dim = arguments(shadow)["dim"] % shadow.meta["val"].dim()
    parts = [operand.meta["val"] for operand in tensor_operands(shadow)]
    sizes = tuple(part.shape[dim] for part in parts if part.dim() > dim)
    if len(sizes) < len(parts) or any(size % world_size for size in sizes):
        return []
    return [Strategy((S(dim),) * len(sizes), (S(dim, sizes),))]


def _matching(
    found: Sequence[Strategy], operands: Sequence[Placement], num_results: int
) -> list[Results]:
    """Results of the strategies that take exactly ``operands``; what a rule leaves out is R."""
    results = []
    for strategy in map(_valued, found):
        if strategy.operands == tuple(operands):
            padding = itertools.repeat(R, num_results - len(strategy.results))
            results.append((*strategy.results, *padding))
    return list(dict.fromkeys(results))


def _valued(strategy: Strategy) -> Strategy:
    return Strategy(tuple(map(as_value, strategy.operands)), tuple(map(as_value, strategy.results)))


def _part(shape: Shape, placement: Placement, world_size: int) -> Shape | None:
    try:
        return placement.local_shape(shape, world_size)
    except (ValueError, IndexError):
        return None
