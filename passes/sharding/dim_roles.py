"""Which values take part in sharding, and what their dimensions mean.

A value is (node, index of its result). It is *active* when it depends on a parameter or on an input
that needs a gradient; all others (positions, masks, rotary tables) are computed by every rank.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from sp_compiler.ir.fx import carries_gradient, tensor_operands
from sp_compiler.ir.program import Call, Program, Region
from sp_compiler.ops.registry import operator_of
from sp_compiler.rules.factors import Dim, Dims, Factor, OpRule
from sp_compiler.rules.table import is_pointwise, rule_for

Value = tuple[Node, int]

WholeNode = tuple[str, str]
"""Names of a region and of an operator in it that is to run whole."""


def value_of(node: Node) -> Value:
    """The value that ``node`` names, looking through ``getitem`` of a multi-result operator."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]
    return node, 0


def results_of(node: Node) -> list[Value]:
    """All tensor results of ``node``."""
    value = node.meta["val"]
    return (
        [(node, i) for i in range(len(value))] if isinstance(value, (tuple, list)) else [(node, 0)]
    )


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(_fake(value).shape)


def bytes_of(value: Value) -> int:
    fake = _fake(value)
    return int(fake.numel() * fake.element_size())


def _fake(value: Value):  # type: ignore[no-untyped-def]
    node, index = value
    fake = node.meta["val"]
    return fake[index] if isinstance(fake, (tuple, list)) else fake


def operators(region: Region) -> Iterator[Node]:
    """Nodes that compute: everything but placeholders, outputs and ``getitem``."""
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
        segmentations: (value, dim) to the part sizes in which the dim is cut by a later operator.
        rules: the rule of every active operator.
    """

    active: dict[Value, None] = field(default_factory=dict)
    tokens: dict[tuple[Value, int], None] = field(default_factory=dict)
    features: dict[tuple[Value, int], None] = field(default_factory=dict)
    segmentations: dict[tuple[Value, int], dict[tuple[int, ...], None]] = field(
        default_factory=dict
    )
    rules: dict[Node, OpRule | None] = field(default_factory=dict)

    def add_tokens(self, value: Value, num_dims: int) -> None:
        """Mark the first ``num_dims`` dims."""
        sizes = shape_of(value)[:num_dims]
        self.tokens.update({(value, dim): None for dim, size in enumerate(sizes) if size != 1})

    def num_rows(self, value: Value) -> int:
        """How many leading dims flatten to rows of tokens; 0 where tokens are elsewhere too."""
        shape = shape_of(value)
        tokens = [dim for dim in range(len(shape)) if (value, dim) in self.tokens]
        if not tokens:
            return 0
        count = tokens[-1] + 1
        leading = all(dim in tokens or shape[dim] == 1 for dim in range(count))
        return count if leading else 0

    def num_token_dims(self, value: Value) -> int:
        return sum((value, dim) in self.tokens for dim in range(len(shape_of(value))))


def activate(program: Program, whole: Collection[WholeNode] = ()) -> dict[int, RegionValues]:
    """Facts by ``id(region)``; activity flows along the calls until nothing changes.

    Operators in ``whole`` have no rule.
    """
    facts = {id(region): RegionValues() for region in program.regions}
    changed = True
    while changed:
        changed = False
        for call in program.calls:
            changed |= _activate_call(program, call, facts)
    for region in program.regions:
        values = facts[id(region)]
        for node in operators(region):
            if any(value in values.active for value in results_of(node)):
                refused = (region.name, node.name) in whole
                values.rules[node] = None if refused else rule_for(node)
    return facts


def _activate_call(program: Program, call: Call, facts: dict[int, RegionValues]) -> bool:
    """Carry activity into and through a call; whether any value of its region became active."""
    active = facts[id(call.region)].active
    before = len(active)
    for node, ref in zip(call.region.placeholders, call.args, strict=True):
        if ref.kind == "param" or (ref.kind == "input" and node.meta["requires_grad"]):
            active[node, 0] = None
        elif ref.kind == "call":
            producer = program.calls[ref.index].region
            if value_of(producer.outputs[ref.output]) in facts[id(producer)].active:
                active[node, 0] = None
    for node in operators(call.region):
        if _is_source(node) or any(value_of(x) in active for x in tensor_operands(node)):
            active.update(dict.fromkeys(_shardable(node)))
    return len(active) != before


def _shardable(node: Node) -> list[Value]:
    """Differentiable results, masks and random numbers; every rank has others unsharded."""
    placed = _is_placed(node)
    return [value for value in results_of(node) if placed or carries_gradient(_fake(value))]


def _is_source(node: Node) -> bool:
    """Random numbers, which are made of nothing but their place: a rank draws only its part."""
    return _is_placed(node) and not any(x.meta["val"].dim() for x in tensor_operands(node))


def is_elementwise(node: Node) -> bool:
    """Pointwise operators and dropout, whose masks follow the element's place in the whole."""
    return _is_placed(node) or is_pointwise(node)


def _is_placed(node: Node) -> bool:
    ours = operator_of(node.target)
    return ours is not None and ours.placed


def residual_stream(program: Program, facts: dict[int, RegionValues]) -> dict[Value, None]:
    """Values that cross regions as rows of tokens, and what elementwise operators tie to them.

    Plain tensor parallelism has them whole on every rank; ``label_dims`` must have run.
    """
    found: dict[Value, None] = {}
    for call in program.calls:
        for node, ref in zip(call.region.placeholders, call.args, strict=True):
            if ref.kind == "call" and facts[id(call.region)].num_rows((node, 0)):
                producer = program.calls[ref.index].region
                found[node, 0] = found[value_of(producer.outputs[ref.output])] = None
    # To a fixed point: a sum ties its operands in both directions, across regions too.
    before = -1
    while len(found) != before:
        before = len(found)
        for region in program.regions:
            for node in filter(is_elementwise, facts[id(region)].rules):
                operands = map(value_of, tensor_operands(node))
                tied = [v for v in operands if shape_of(v) == shape_of((node, 0))]
                if any(value in found for value in (*tied, (node, 0))):
                    found.update(dict.fromkeys((*tied, (node, 0))))
    return found


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
    for node, kind in zip(region.placeholders, region.input_kinds, strict=True):
        if kind == "size":
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
    """Activations that cross regions are (tokens..., features); others have more dims."""
    rank = len(shape_of(value))
    if value in facts.active and rank in (2, 3):
        facts.add_tokens(value, rank - 1)


def _propagate(node: Node, rule: OpRule, facts: RegionValues, world_size: int) -> bool:
    places = list(_places(node, rule))
    before = len(facts.tokens) + len(facts.features) + _count(facts)
    for table in (facts.tokens, facts.features):
        marked = _marked(places, table)
        for value, dims in places:
            for d, dim in enumerate(dims):
                marks = dim and all(factor.name in marked for factor in dim)
                if marks and (table is facts.features or shape_of(value)[d] != 1):
                    table[value, d] = None
    _pick_tokens(node, facts)
    _demand(node, rule, facts, world_size, _marked(places, facts.tokens))
    return len(facts.tokens) + len(facts.features) + _count(facts) != before


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
    """Mark what is picked from the tokens, in any order (those of one expert), as tokens."""
    if node.target is not torch.ops.aten.index.Tensor:
        return
    source, indices = value_of(node.args[0]), node.args[1]
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    if picked == [0] and (source, 0) in facts.tokens:
        rank = len(shape_of((indices[0], 0)))
        facts.tokens.update(dict.fromkeys(((node, 0), dim) for dim in range(rank)))


def _count(facts: RegionValues) -> int:
    return sum(len(found) for found in facts.segmentations.values())


def _places(node: Node, rule: OpRule) -> Iterator[tuple[Value, Dims]]:
    for operand, dims in zip(tensor_operands(node), rule.operands, strict=True):
        yield value_of(operand), dims
    for value, dims in zip(results_of(node), rule.results, strict=True):
        yield value, dims


def _demand(
    node: Node, rule: OpRule, facts: RegionValues, world_size: int, tokens: set[str]
) -> None:
    """Carry from results back to operands in which parts a dim will be cut."""
    operands = [value_of(operand) for operand in tensor_operands(node)]
    if rule.split is not None:
        dim, sizes = rule.split
        if all(size % world_size == 0 for size in sizes):
            facts.segmentations.setdefault((operands[0], dim), {})[sizes] = None
    wanted: dict[Factor, dict[tuple[int, ...], None]] = {}
    for value, d, factors in _dims_of(results_of(node), rule.results):
        if len(factors) == 1:
            wanted.setdefault(factors[0], {}).update(facts.segmentations.get((value, d), {}))
    inner: dict[str, None] = {}
    for value, d, factors in _dims_of(operands, rule.operands):
        if len(factors) == 1:
            parts = wanted.get(factors[0], {})
        else:
            cut = _inner_cut(factors, world_size, tokens)
            parts = {parts_at(factors, factor): None for factor in cut}
            inner.update(dict.fromkeys(factor.name for factor in cut))
        if parts:
            facts.segmentations.setdefault((value, d), {}).update(parts)
    # What is cut out of a fused dim is heads, whatever was fused with it.
    for value, d, factors in _dims_of(results_of(node), rule.results):
        if len(factors) == 1 and factors[0].name in inner:
            facts.features[value, d] = None


def _dims_of(values: list[Value], dims: tuple[Dims, ...]) -> Iterator[tuple[Value, int, Dim]]:
    """Each dim of each value, with its factors."""
    for value, each in zip(values, dims, strict=True):
        for d, factors in enumerate(each):
            yield value, d, factors


def _inner_cut(dim: tuple[Factor, ...], world_size: int, tokens: set[str]) -> list[Factor]:
    """Factors along which a fused dim may be cut inside: those that divide and are not tokens.

    (3 h) of q, k, v and (b a) of a batch's heads are cut along h and a.
    """
    return [
        f for f in dim[1:] if f.size % world_size == 0 and not f.blocked and f.name not in tokens
    ]


def parts_at(dim: tuple[Factor, ...], factor: Factor) -> tuple[int, ...]:
    """Sizes of the parts, one for each index of the factors before ``factor``."""
    before = list(itertools.takewhile(lambda other: other.name != factor.name, dim))
    outer, size = (math.prod(item.size for item in items) for items in (before, dim))
    return (size // outer,) * outer
