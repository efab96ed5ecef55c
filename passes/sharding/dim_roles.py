"""Values that take part in sharding, and the roles of their dimensions.

A value is (node, index of its result). It is *active* if it depends on a parameter or on an input
that needs a gradient; all others (positions, masks, rotary tables) are computed by every rank.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.placement import Segmentation
from sp_compiler.ir.fx import carries_gradient, tensor_operands
from sp_compiler.ir.program import Call, Program, Region
from sp_compiler.ops.registry import operator_of
from sp_compiler.passes.sharding.units import demand_split_units, demand_units
from sp_compiler.rules.factors import Dim, Dims, Factor, OpRule
from sp_compiler.rules.table import is_pointwise, rule_for

Value = tuple[Node, int]

ReplicatedNode = tuple[str, str]
"""Names of a region and of an operator in it that is to run replicated."""


def value_of(node: Node) -> Value:
    """Return the value of ``node``, looking through ``getitem`` of several results."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]
    return node, 0


def results_of(node: Node) -> list[Value]:
    """Return all tensor results of ``node``."""
    value = node.meta["val"]
    return (
        [(node, i) for i in range(len(value))] if isinstance(value, (tuple, list)) else [(node, 0)]
    )


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(_fake(value).shape)


def bytes_of(value: Value) -> int:
    fake = _fake(value)
    return fake.numel() * fake.element_size()


def _fake(value: Value) -> Tensor:
    node, index = value
    fake = node.meta["val"]
    return fake[index] if isinstance(fake, (tuple, list)) else fake


def operators(region: Region) -> Iterator[Node]:
    """Yield nodes that compute: everything but placeholders, outputs and ``getitem``."""
    for node in region.module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            yield node


@dataclass
class RegionValues:
    """Facts about one region's values.

    Attributes:
        active: values that take part in sharding.
        tokens: (value, dim) pairs that run over tokens (batch, sequence or both); never a dim of
            size 1, to which no factor leads: some values would count it among the features.
        features: (value, dim) pairs that come from a parameter's dim (heads, width, vocabulary).
        segmentations: (value, dim) to the parts in which the dim is cut by another operator.
        rules: the rule of every active operator.
    """

    # Dicts with None as values are ordered sets: the solver's vertices follow their order, which
    # has to be the same on every rank.
    active: dict[Value, None] = field(default_factory=dict)
    tokens: dict[tuple[Value, int], None] = field(default_factory=dict)
    features: dict[tuple[Value, int], None] = field(default_factory=dict)
    segmentations: dict[tuple[Value, int], dict[Segmentation, None]] = field(default_factory=dict)
    rules: dict[Node, OpRule | None] = field(default_factory=dict)

    def add_tokens(self, value: Value, num_dims: int) -> None:
        """Mark the first ``num_dims`` dims."""
        sizes = shape_of(value)[:num_dims]
        self.tokens.update({(value, dim): None for dim, size in enumerate(sizes) if size != 1})

    def num_rows(self, value: Value) -> int:
        """Return the number of leading dims that flatten to rows of tokens; 0 if tokens are
        elsewhere."""
        shape = shape_of(value)
        tokens = [dim for dim in range(len(shape)) if (value, dim) in self.tokens]
        if not tokens:  # a weight, or a value with features alone
            return 0
        # Up to the last token dim; in between only sizes of 1, which change no row.
        count = tokens[-1] + 1
        leading = all(dim in tokens or shape[dim] == 1 for dim in range(count))
        return count if leading else 0

    def num_token_dims(self, value: Value) -> int:
        return sum((value, dim) in self.tokens for dim in range(len(shape_of(value))))


def activate(
    program: Program, replicated: Collection[ReplicatedNode] = ()
) -> dict[int, RegionValues]:
    """Return facts by ``id(region)``; activity is propagated along the calls to a fixed point.

    Operators in ``replicated`` have no rule.
    """
    facts = {id(region): RegionValues() for region in program.regions}
    # To a fixed point: a region that is called twice may get an active value at the second call.
    changed = True
    while changed:
        changed = False
        for call in program.calls:
            changed |= _activate_call(program, call, facts)
    for region in program.regions:
        values = facts[id(region)]
        for node in operators(region):
            if any(value in values.active for value in results_of(node)):
                refused = (region.name, node.name) in replicated
                values.rules[node] = None if refused else rule_for(node)
    return facts


def _activate_call(program: Program, call: Call, facts: dict[int, RegionValues]) -> bool:
    """Propagate activity through a call; return whether any value became active."""
    active, has_changed = facts[id(call.region)].active, False
    before = len(active)
    for node, ref in zip(call.region.placeholders, call.args, strict=True):
        if ref.kind == "param" or (ref.kind == "input" and node.meta["requires_grad"]):
            active[node, 0] = None
        elif ref.kind == "call":
            producer = program.calls[ref.index].region
            value, made = value_of(producer.outputs[ref.output]), facts[id(producer)].active
            if value in made:
                active[node, 0] = None
            # Of another call of the region: this one's value is placed with that one's.
            elif (node, 0) in active:
                made[value] = None
                has_changed = True
    for node in operators(call.region):
        operands = tensor_operands(node)
        # Random numbers that are made by their place alone: a rank draws only its part.
        is_source = _is_placed(node) and not any(x.meta["val"].dim() for x in operands)
        if is_source or any(value_of(x) in active for x in operands):
            # Integers and booleans made of activations are computed by every rank; not so dropout
            # masks and random numbers, which belong to one rank's part of a value.
            placed = _is_placed(node)
            active.update(
                (value, None)
                for value in results_of(node)
                if placed or carries_gradient(_fake(value))
            )
    return has_changed or len(active) != before


def is_elementwise(node: Node) -> bool:
    """Return whether it is pointwise, or dropout, whose mask depends on the element's global
    position."""
    return _is_placed(node) or is_pointwise(node)


def _is_placed(node: Node) -> bool:
    ours = operator_of(node.target)
    return ours is not None and ours.placed


def residual_stream(program: Program, facts: dict[int, RegionValues]) -> dict[Value, None]:
    """Return values that cross regions as rows of tokens, and values tied to them elementwise.

    Without sequence parallelism they are replicated; ``label_dims`` must have run.
    """
    stream: dict[Value, None] = {}
    for call in program.calls:
        for node, ref in zip(call.region.placeholders, call.args, strict=True):
            if ref.kind == "call" and facts[id(call.region)].num_rows((node, 0)):
                producer = program.calls[ref.index].region
                stream[node, 0] = stream[value_of(producer.outputs[ref.output])] = None
    # To a fixed point: a sum ties its operands in both directions, across regions too.
    before = -1
    while len(stream) != before:
        before = len(stream)
        for region in program.regions:
            for node in filter(is_elementwise, facts[id(region)].rules):
                operands = map(value_of, tensor_operands(node))
                # Not those that are broadcast: a bias is no part of the stream.
                tied = [v for v in operands if shape_of(v) == shape_of((node, 0))]
                if any(value in stream for value in (*tied, (node, 0))):
                    stream.update(dict.fromkeys((*tied, (node, 0))))
    return stream


def label_dims(region: Region, facts: RegionValues, world_size: int) -> None:
    """Fill ``tokens``, ``features`` and ``segmentations`` by following factors to a fixed point."""
    _seed(region, facts)
    changed = True
    while changed:
        changed = False
        for node, rule in facts.rules.items():
            if rule is not None:
                changed |= _propagate(node, rule, facts, world_size)


def _seed(region: Region, facts: RegionValues) -> None:
    """Mark the dims whose role is known without a rule: those of inputs and outputs."""
    for node, kind in zip(region.placeholders, region.input_kinds, strict=True):
        if kind == "size":  # a number, without dims
            continue
        value = (node, 0)
        rank = len(shape_of(value))
        if kind == "param":
            facts.features.update(dict.fromkeys((value, dim) for dim in range(rank)))
        # Token ids, masks, positions: all of their dims run over tokens.
        elif kind == "input" and not carries_gradient(node.meta["val"]):
            facts.add_tokens(value, rank)
        elif kind in ("call", "input"):
            _seed_rows(facts, value)
    for node in region.outputs:
        if isinstance(node, Node):
            _seed_rows(facts, value_of(node))
    for node in facts.rules:
        # Ids of an embedding are positions in a sequence wherever they come from.
        if (
            getattr(node.target, "_schema", None) is not None
            and "embedding" in node.target._schema.name
        ):
            facts.add_tokens((node, 0), len(shape_of((node, 0))) - 1)


def _seed_rows(facts: RegionValues, value: Value) -> None:
    """Mark tokens of activations that cross regions as (tokens..., features)."""
    # With more dims the layout is not known: (b, a, s, d) has features in front of tokens.
    rank = len(shape_of(value))
    if value in facts.active and rank in (2, 3):
        facts.add_tokens(value, rank - 1)


def _propagate(node: Node, rule: OpRule, facts: RegionValues, world_size: int) -> bool:
    """Propagate roles through one operator, in both directions; return whether any is new."""
    operands = map(value_of, tensor_operands(node))
    places: list[tuple[Value, Dims]] = [
        *zip(operands, rule.operands, strict=True),
        *zip(results_of(node), rule.results, strict=True),
    ]
    before = _count(facts, places)
    for table in (facts.tokens, facts.features):
        marked = _marked(places, table)
        for value, dims in places:
            for d, dim in enumerate(dims):
                # All factors: a dim that merges tokens with features is neither.
                marks = dim and all(factor.name in marked for factor in dim)
                if marks and (table is facts.features or shape_of(value)[d] != 1):
                    table[value, d] = None
    _pick_tokens(node, facts)
    tokens = _marked(places, facts.tokens)
    _demand(node, rule, facts, world_size, tokens)
    features = _marked(places, facts.features)
    demand_units(places, facts.segmentations, features - tokens, tokens, world_size)
    if rule.split is not None:
        demand_split_units(places, rule.split, facts.segmentations, world_size)
    return _count(facts, places) != before


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
    # By hand, for the rule of ``index`` has no factor that leads from one to the other.
    if node.target is not torch.ops.aten.index.Tensor:
        return
    source, indices = value_of(node.args[0]), node.args[1]
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    if picked == [0] and (source, 0) in facts.tokens:
        rank = len(shape_of((indices[0], 0)))
        facts.tokens.update(dict.fromkeys(((node, 0), dim) for dim in range(rank)))


def _count(facts: RegionValues, places: Sequence[tuple[Value, Dims]]) -> int:
    """Return how much is known of the dims of an operator's ``places``, and of roles anywhere."""
    # Of other places no operator learns parts; to count those of all would take minutes in a region
    # of thousands.
    cuts = facts.segmentations
    of_places = (cuts.get((value, d), ()) for value, dims in places for d in range(len(dims)))
    return len(facts.tokens) + len(facts.features) + sum(map(len, of_places))


def _demand(
    node: Node, rule: OpRule, facts: RegionValues, world_size: int, tokens: set[str]
) -> None:
    """Propagate the parts into which a dim will be split from results back to operands.

    The placement of a parameter suits later operators: a fused q, k, v is split only after its
    product, and must be sharded within each of the three.
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
            # Units go by rules of their own.
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
