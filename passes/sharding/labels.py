"""Roles of the dims of a program's values: tokens and features, and the parts they are cut into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from sp_compiler.base.placement import Segmentation
from sp_compiler.ir.fx import carries_gradient, tensor_operands
from sp_compiler.ir.graph_theory import connected
from sp_compiler.ir.program import Program, Region
from sp_compiler.passes.sharding.dim_roles import (
    RegionValues,
    Value,
    results_of,
    value_of,
    value_shape,
)
from sp_compiler.passes.sharding.units import demand_split_units, demand_units
from sp_compiler.rules.factors import Dim, Dims, Factor, OpRule


def label_dims(program: Program, facts: dict[int, RegionValues], world_size: int) -> None:
    """Fill ``tokens``, ``features`` and ``segmentations`` by following factors to a fixed point.

    Args:
        facts: by ``id(region)``.
        world_size: number of ranks.
    """
    channels = _label_channels(program, facts)
    for region in program.regions:
        _seed(region, facts[id(region)], channels)
        _spread_roles(facts[id(region)], world_size)


def _label_channels(
    program: Program, facts: dict[int, RegionValues]
) -> dict[Value, tuple[int, ...]]:
    """Mark features, also in regions that learn of them only from neighboring regions.

    Returns:
        By value that crosses regions, the dims of channels if they precede the token dims: between
        convolutions values are (b, c, s) or (b, c, h, w), elsewhere (b, s, h).
    """
    for region in program.regions:
        params = [
            (node, 0)
            for node, kind in zip(region.placeholders, region.input_kinds, strict=True)
            if kind == "param"
        ]
        marks = ((value, dim) for value in params for dim in range(len(value_shape(value))))
        facts[id(region)].features.update(dict.fromkeys(marks))
    classes, where = _crossings(program, facts)
    # To a fixed point: a region without parameters learns of channels from the regions on one side,
    # and passes them on to those on the other.
    channels: dict[Value, tuple[int, ...]] = {}
    pending = list(facts.values())
    while pending:
        for each in pending:
            _spread_features(each)
        channels = {value: _channels(values, where) for values in classes for value in values}
        changed: dict[int, RegionValues] = {}
        for value, dims in channels.items():
            known = where[value]
            features = dict.fromkeys((value, dim) for dim in dims)
            if features.keys() - known.features.keys():
                known.features.update(features)
                changed[id(known)] = known
        pending = list(changed.values())
    return channels


def _crossings(
    program: Program, facts: dict[int, RegionValues]
) -> tuple[list[list[Value]], dict[Value, RegionValues]]:
    """Return the classes of values that calls pass to each other, and the region of each value."""
    ties: list[tuple[Value, Value]] = []
    where: dict[Value, RegionValues] = {}
    for call in program.calls:
        for node, ref in call.inputs:
            if ref.kind == "call":
                producer = program.calls[ref.index].region
                made, read = value_of(producer.outputs[ref.output]), (node, 0)
                ties.append((made, read))
                where |= {made: facts[id(producer)], read: facts[id(call.region)]}
    return connected(ties), where


def _channels(values: list[Value], where: dict[Value, RegionValues]) -> tuple[int, ...]:
    """Return the dims of one crossing value that are features; () if the last one is, or if none
    is known to be."""
    rank = len(value_shape(values[0]))
    dims = [d for d in range(rank) if any((v, d) in where[v].features for v in values)]
    # A learned embedding of positions makes all dims of (b, s, h) features.
    return () if rank - 1 in dims else tuple(dims)


def _spread_features(facts: RegionValues) -> None:
    places = [_places(node, rule) for node, rule in facts.rules.items() if rule is not None]
    before = -1
    while len(facts.features) != before:
        before = len(facts.features)
        for each in places:
            _mark(each, facts.features)
        # In alternating directions, so that one sweep carries marks all the way up or down.
        places.reverse()


def _spread_roles(facts: RegionValues, world_size: int) -> None:
    operators = [(node, rule) for node, rule in facts.rules.items() if rule is not None]
    num_changed = len(operators)
    while num_changed:
        num_changed = sum(_propagate(node, rule, facts, world_size) for node, rule in operators)


def _seed(region: Region, facts: RegionValues, channels: dict[Value, tuple[int, ...]]) -> None:
    """Mark the dims whose role is known without a rule: those of inputs and outputs."""
    for node, kind in zip(region.placeholders, region.input_kinds, strict=True):
        if kind == "size":  # a scalar, without dims
            continue
        value = (node, 0)
        # Token ids, masks, positions: all of their dims run over tokens.
        if kind == "input" and not carries_gradient(node.meta["val"]):
            facts.add_tokens(value, range(len(value_shape(value))))
        elif kind in ("call", "input"):
            _seed_rows(facts, value, channels.get(value, ()))
    for node in region.outputs:
        if isinstance(node, Node):
            _seed_rows(facts, value_of(node), channels.get(value_of(node), ()))
    for node in facts.rules:
        # Ids of an embedding are positions in a sequence, regardless of their source.
        if (
            getattr(node.target, "_schema", None) is not None
            and "embedding" in node.target._schema.name
        ):
            facts.add_tokens((node, 0), range(len(value_shape((node, 0))) - 1))


def _seed_rows(facts: RegionValues, value: Value, channels: tuple[int, ...]) -> None:
    """Mark tokens of activations that cross regions as (tokens..., features), or as (batch,
    channels, tokens)."""
    # With more dims the layout is not known: in (b, a, s, d) features precede tokens.
    rank = len(value_shape(value))
    if value in facts.active and rank in (2, 3):
        features = channels or (rank - 1,)
        facts.add_tokens(value, [d for d in range(rank) if d not in features])


def _propagate(node: Node, rule: OpRule, facts: RegionValues, world_size: int) -> bool:
    """Propagate roles through one operator, in both directions; return whether any is new."""
    places = _places(node, rule)
    before = _count(facts, places)
    _mark(places, facts.tokens, ones=False)
    _mark(places, facts.features)
    _pick_tokens(node, facts)
    tokens = _marked(places, facts.tokens)
    _demand(node, rule, facts, world_size, tokens)
    features = _marked(places, facts.features)
    demand_units(places, facts.segmentations, features - tokens, tokens, world_size)
    if rule.split is not None:
        demand_split_units(places, rule.split, facts.segmentations, world_size)
    return _count(facts, places) != before


def _places(node: Node, rule: OpRule) -> list[tuple[Value, Dims]]:
    """The operands and results of an operator, each with the factors of its dims."""
    operands = map(value_of, tensor_operands(node))
    return [
        *zip(operands, rule.operands, strict=True),
        *zip(results_of(node), rule.results, strict=True),
    ]


def _mark(
    places: list[tuple[Value, Dims]], table: dict[tuple[Value, int], None], *, ones: bool = True
) -> None:
    """Add to ``table`` the dims whose factors all occur in its dims; ``ones``: also of size 1."""
    marked = _marked(places, table)
    for value, dims in places:
        for d, dim in enumerate(dims):
            # All factors: a dim that merges tokens with features is neither.
            if dim and all(f.name in marked for f in dim) and (ones or value_shape(value)[d] != 1):
                table[value, d] = None


def _marked(places: list[tuple[Value, Dims]], table: dict[tuple[Value, int], None]) -> set[str]:
    """Names of the factors of dims that are in ``table``."""
    return {
        factor.name
        for value, dims in places
        for d, dim in enumerate(dims)
        if (value, d) in table
        for factor in dim
    }


def _pick_tokens(node: Node, facts: RegionValues) -> None:
    """Mark rows that are gathered from tokens, in any order (those of one expert), as tokens."""
    # By hand, because the rule of ``index`` has no factor that leads from one to the other.
    if node.target is not torch.ops.aten.index.Tensor:
        return
    source, indices = value_of(node.args[0]), node.args[1]
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    if picked == [0] and (source, 0) in facts.tokens:
        rank = len(value_shape((indices[0], 0)))
        facts.tokens.update(dict.fromkeys(((node, 0), dim) for dim in range(rank)))


def _count(facts: RegionValues, places: Sequence[tuple[Value, Dims]]) -> int:
    """Return how much is known of the dims of an operator's ``places``, and of roles anywhere."""
    # One operator adds parts only to its own places; counting those of all places would take
    # minutes in a region of thousands of operators.
    cuts = facts.segmentations
    of_places = (cuts.get((value, d), ()) for value, dims in places for d in range(len(dims)))
    return len(facts.tokens) + len(facts.features) + sum(map(len, of_places))


def _demand(
    node: Node, rule: OpRule, facts: RegionValues, world_size: int, tokens: set[str]
) -> None:
    """Propagate the parts into which a dim will be split from results back to operands.

    The placement of a parameter suits later operators: a fused q, k, v is split only after its
    matmul, and must be sharded within each of the three.
    """
    operands = [value_of(operand) for operand in tensor_operands(node)]
    if rule.split is not None:
        dim, sizes = rule.split
        if all(size % world_size == 0 for size in sizes):
            facts.segmentations.setdefault((operands[0], dim), {})[Segmentation(sizes)] = None
    # By factor, which is the same dim before and after the operator.
    wanted: dict[Factor, dict[Segmentation, None]] = {}
    for value, d, factors in _dims_of(results_of(node), rule.results):
        if len(factors) == 1:
            known = facts.segmentations.get((value, d), {})
            # Units are propagated by separate rules.
            wanted.setdefault(factors[0], {}).update((cut, None) for cut in known if not cut.units)
    inner: dict[str, None] = {}
    for value, d, factors in _dims_of(operands, rule.operands):
        if len(factors) == 1:
            parts = wanted.get(factors[0], {})
        else:
            # A fused dim may be cut inside: (3 h) of q, k, v and (b a) of a batch's heads along h
            # and a. Not along tokens, which are sharded as rows.
            cut = [
                f
                for f in factors[1:]
                if f.size % world_size == 0 and not f.blocked and f.name not in tokens
            ]
            parts = {Segmentation(parts_at(factors, factor)): None for factor in cut}
            inner.update(dict.fromkeys(factor.name for factor in cut))
        if parts:
            facts.segmentations.setdefault((value, d), {}).update(parts)
    # A factor that is cut out of a fused dim is a feature (heads), whatever was fused with it.
    for value, d, factors in _dims_of(results_of(node), rule.results):
        if len(factors) == 1 and factors[0].name in inner:
            facts.features[value, d] = None


def _dims_of(values: list[Value], dims: tuple[Dims, ...]) -> Iterator[tuple[Value, int, Dim]]:
    """Yield each dim of each value, with its factors."""
    for value, each in zip(values, dims, strict=True):
        for d, factors in enumerate(each):
            yield value, d, factors


def parts_at(dim: tuple[Factor, ...], factor: Factor) -> tuple[int, ...]:
    """Sizes of the parts, one for each index of the factors before ``factor``."""
    before = list(itertools.takewhile(lambda other: other.name != factor.name, dim))
    outer, size = (math.prod(item.size for item in items) for items in (before, dim))
    return (size // outer,) * outer
