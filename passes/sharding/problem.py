"""From a program to the placement problem: vertices, their options, the price of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import I, P, Placement, R, T, shard_of
from sp_compiler.cost.hardware import H100, conversion_us, operator_us
from sp_compiler.cost.node_cost import product_flops
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.hints import placement_text
from sp_compiler.ir.program import Program, Ref
from sp_compiler.passes.sharding.dim_roles import (
    RegionValues,
    Value,
    bytes_of,
    is_elementwise,
    operators,
    parts_at,
    residual_stream,
    results_of,
    shape_of,
    value_of,
)
from sp_compiler.passes.sharding.reasons import why_whole
from sp_compiler.rules.factors import Factor, OpRule
from sp_compiler.rules.padding import may_pad
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.vocabulary import vocabulary_strategies
from sp_compiler.solve.placement_problem import Option, Vertex

aten = torch.ops.aten
Key = tuple[int, Value]
"""A value of the problem: (index of the region, value)."""


@dataclass
class Problem:
    """The vertices and what each stands for, in the same order.

    Attributes:
        subjects: (region index, node) of an operator; ("param", class), ("boundary", class) or
            ("output", index) for the others.
        strategies: for operators, the strategy behind each option.
        params: class number of each parameter.
    """

    vertices: list[Vertex] = field(default_factory=list)
    subjects: list[tuple] = field(default_factory=list)  # type: ignore[type-arg]
    strategies: list[list[Strategy]] = field(default_factory=list)
    param_class: dict[str, int] = field(default_factory=dict)
    boundary_class: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def add(self, subject: tuple, vertex: Vertex, found: list[Strategy] | None = None) -> None:  # type: ignore[type-arg]
        self.vertices.append(vertex)
        self.subjects.append(subject)
        self.strategies.append(found or [])


# More than any step takes.
_LAST_RESORT_US = 1e6


class _Classes:
    """Union-find over hashable items, numbered in order of first appearance."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def find(self, item: object) -> object:
        self.parent.setdefault(item, item)
        while self.parent[item] != item:
            item = self.parent[item]
        return item

    def union(self, a: object, b: object) -> None:
        self.parent[self.find(b)] = self.find(a)

    def numbered(self) -> dict[Any, int]:
        roots: dict[object, int] = {}
        return {item: roots.setdefault(self.find(item), len(roots)) for item in list(self.parent)}


class ProblemBuilder:
    """Builds the :class:`Problem` of a whole program.

    Args:
        program: unsharded.
        facts: by ``id(region)``, see :mod:`sp_compiler.passes.sharding.dim_roles`.
        world_size: number of ranks.
        sequence_parallel: whether values may be sharded by token rows.
        nominal_tokens: the placements are priced as if this many tokens were in a batch.
        output_placements: allowed placements of the model's output ``i`` beside I.
        fixed: storage placements decided by an earlier compilation.
    """

    def __init__(
        self,
        program: Program,
        facts: dict[int, RegionValues],
        *,
        world_size: int,
        sequence_parallel: bool,
        nominal_tokens: int,
        shard_outputs: Callable[[int], bool],
        fixed: dict[str, Placement],
    ) -> None:
        self.program = program
        self.opened = program  # the same with its open sizes
        self.regions = program.regions
        self.index = {id(region): i for i, region in enumerate(self.regions)}
        self.facts = [facts[id(region)] for region in self.regions]
        self.world_size = world_size
        self.sequence_parallel = sequence_parallel
        self.whole: dict[Value, None] = {} if sequence_parallel else residual_stream(program, facts)
        self.shard_outputs = shard_outputs
        self.fixed = fixed
        self.num_calls = [
            sum(call.region is region for call in program.calls) for region in self.regions
        ]
        self.scale = max(1.0, nominal_tokens / max(1, self._num_tokens()))
        self.problem = Problem()

    def build(self) -> Problem:
        for i, region in enumerate(self.regions):
            for node in operators(region):
                if node in self.facts[i].rules:
                    self._add_operator(i, node)
        self._add_params()
        self._add_boundaries()
        self._add_outputs()
        return self.problem

    def conversion_cost(self, key: Key, source: Placement, target: Placement) -> float | None:
        """Price of a conversion in all calls of the region.

        Parameters only turn from I to R. One that an earlier compilation sharded is gathered where
        nothing else is possible: an operator of this program alone needs it whole.
        """
        i, value = key
        needs_grad = bool(value[0].meta.get("requires_grad"))
        if value[0].op == "placeholder" and self._kind(i, value[0]) == "param":
            # Its gradient goes with all others in one bucket: no latency of its own.
            if source.is_sharded and target.is_replicated and self._is_fixed(i, value[0]):
                return _LAST_RESORT_US * self.num_calls[i]
            wire = bytes_of(value) * 2 / H100.link_bytes_per_us
            return wire * self.num_calls[i] if (source, target) == (I, R) else None
        size = bytes_of(value) * self._scale_of(i, value)
        cost = conversion_us(size, source, target, self.world_size, needs_grad=needs_grad)
        return None if cost is None else cost * self.num_calls[i]

    # Sizes as they would be in a batch of the nominal number of tokens.

    def _num_tokens(self) -> int:
        rows = [
            math.prod(shape_of(value)[: facts.num_rows(value)])
            for facts in self.facts
            for value in facts.active
            if facts.num_rows(value)
        ]
        return max(rows, default=1)

    def _scale_of(self, i: int, value: Value) -> float:
        count = self.facts[i].num_token_dims(value)
        return float(self.scale ** max(1, count - 1)) if count else 1.0

    def _is_fixed(self, i: int, node: Node) -> bool:
        position = self.regions[i].placeholders.index(node)
        calls = (call for call in self.program.calls if call.region is self.regions[i])
        return next(calls).args[position].name in self.fixed

    def _kind(self, i: int, node: Node) -> str:
        region = self.regions[i]
        return region.input_kinds[region.placeholders.index(node)]

    # Operators.

    def _add_operator(self, i: int, node: Node) -> None:
        facts = self.facts[i]
        operands = [value_of(operand) for operand in tensor_operands(node)]
        results = results_of(node)
        active = [value in facts.active for value in operands]
        made = [value in facts.active for value in results]
        found = [
            strategy
            for strategy in self._strategies(i, node, operands, results)
            if not any(p == P and not a for p, a in zip(strategy.operands, active, strict=True))
            and not any(p.is_sharded and not a for p, a in zip(strategy.results, made, strict=True))
        ]
        options = [
            Option(
                tuple(p for p, a in zip(s.operands, active, strict=True) if a),
                tuple(p for p, a in zip(s.results, made, strict=True) if a),
                self._operator_cost(i, node, operands, results, s),
            )
            for s in found
        ]
        vertex = Vertex(
            tuple((i, v) for v, a in zip(operands, active, strict=True) if a),
            tuple((i, v) for v, a in zip(results, made, strict=True) if a),
            options,
        )
        self.problem.add((i, node), vertex, found)

    def _strategies(
        self, i: int, node: Node, operands: list[Value], results: list[Value]
    ) -> list[Strategy]:
        facts, rule = self.facts[i], self.facts[i].rules[node]
        offers = Offers(
            self.world_size,
            lambda factor: rule is not None and self._shardable(i, rule, operands, results, factor),
            lambda factor: self._segmentations(i, rule, operands, results, factor) if rule else (),
            [facts.num_rows(value) for value in operands],
            [facts.num_rows(value) for value in results],
            self.sequence_parallel,
            lambda factor: (
                rule is not None
                and may_pad(node, self._is_parameter(i))
                and self._shardable(i, rule, operands, results, factor)
            ),
        )
        found = strategies(rule, len(operands), len(results), offers)
        return found + vocabulary_strategies(node, self.world_size)

    def _is_parameter(self, i: int) -> Callable[[Node], bool]:
        return lambda node: node.op == "placeholder" and self._kind(i, node) == "param"

    def _places(
        self, rule: OpRule, operands: list[Value], results: list[Value], factor: Factor
    ) -> Iterable[tuple[Value, int, tuple[Factor, ...]]]:
        dims = (*rule.operands, *rule.results)
        for value, item in zip((*operands, *results), dims, strict=True):
            for d, dim in enumerate(item):
                if any(part.name == factor.name for part in dim):
                    yield value, d, dim

    def _shardable(
        self, i: int, rule: OpRule, operands: list[Value], results: list[Value], factor: Factor
    ) -> bool:
        features = self.facts[i].features
        places = self._places(rule, operands, results, factor)
        return self._may_cut(i, rule, operands, results, factor) and any(
            (value, d) in features for value, d, _ in places
        )

    def _may_cut(
        self, i: int, rule: OpRule, operands: list[Value], results: list[Value], factor: Factor
    ) -> bool:
        if results[0] in self.whole and is_elementwise(results[0][0]):
            return False
        tokens = self.facts[i].tokens
        dims = zip((*operands, *results), (*rule.operands, *rule.results), strict=True)
        of_tokens = {
            part.name
            for value, item in dims
            for d, dim in enumerate(item)
            if (value, d) in tokens
            for part in dim
        }
        demanded = self.facts[i].segmentations
        for value, d, dim in self._places(rule, operands, results, factor):
            # Of a fused dim only the outermost factor that divides: the layouts of the others tie
            # where nothing later cuts the dim there.
            dividing = [
                part.name
                for part in dim
                if part.size % self.world_size == 0 and part.name not in of_tokens
            ]
            outermost = len(dim) == 1 or dividing[:1] == [factor.name]
            if not outermost and parts_at(dim, factor) not in demanded.get((value, d), {}):
                return False
        return factor.name not in of_tokens

    def _segmentations(
        self, i: int, rule: OpRule, operands: list[Value], results: list[Value], factor: Factor
    ) -> list[tuple[int, ...]]:
        """In which parts the dim is cut further on, which tells features from tokens too."""
        found: dict[tuple[int, ...], None] = {}
        if not self._may_cut(i, rule, operands, results, factor):
            return []
        for value, d, dim in self._places(rule, operands, results, factor):
            if len(dim) == 1:
                found.update(self.facts[i].segmentations.get((value, d), {}))
        return list(found)

    def _operator_cost(
        self, i: int, node: Node, operands: list[Value], results: list[Value], strategy: Strategy
    ) -> float:
        total, cut = 0.0, False
        placed = zip((*operands, *results), (*strategy.operands, *strategy.results), strict=True)
        for value, placement in placed:
            size = bytes_of(value) * self._scale_of(i, value)
            total += size / self.world_size if placement.is_sharded else size
            cut |= placement.is_sharded
        flops = product_flops(node) * self._scale_of(i, results[0])
        cost = operator_us(flops / self.world_size if cut else flops, total)
        return cost * self.num_calls[i]

    # Parameters, values that cross regions, outputs.

    def _add_params(self) -> None:
        classes = _Classes()
        for call in self.program.calls:
            i = self.index[id(call.region)]
            for position, ref in enumerate(call.args):
                if ref.kind == "param":
                    classes.union(("place", i, position), ("name", ref.name))
        numbers = classes.numbered()
        for number in dict.fromkeys(numbers.values()):
            members = [item for item, n in numbers.items() if n == number]
            names = [item[1] for item in members if item[0] == "name"]
            places = sorted(item[1:] for item in members if item[0] == "place")
            self.problem.param_class.update(dict.fromkeys(names, number))
            keys = [(i, (self.regions[i].placeholders[p], 0)) for i, p in places]
            replicated = self._replicated_cost(keys[0][1]) * len(names)
            fixed = [self.fixed[name] for name in names if name in self.fixed][:1]
            allowed = fixed or self._allowed(names[0], keys)
            options = [
                Option((), (placement,) * len(keys), 0.0 if placement.is_sharded else replicated)
                for placement in allowed
            ]
            self.problem.add(("param", number), Vertex((), tuple(keys), options))

    def _allowed(self, name: str, keys: list[Key]) -> list[Placement]:
        """Ways to store a parameter: those that all its readers can take and hints do not rule out.

        Raises:
            ArgumentError: hints rule out all of them.
        """
        offered = [I, *self._taken_by_all(keys)]
        wish = self.program.wishes.get(name)
        allowed = [p for p in offered if wish is None or wish.allows(p)]
        if not allowed:
            assert wish is not None
            shape, ways = shape_of(keys[0][1]), dict.fromkeys(map(placement_text, offered))
            wanted = wish.allowed[1:].index(True)
            raise ArgumentError(
                f"{wish} cannot be met on {self.world_size} ranks: parameter {name!r} {shape} can "
                f"be {' or '.join(ways)}; {self.why_not_sharded(keys, wanted)}"
            )
        return allowed

    def _taken_by_all(self, keys: list[Key]) -> list[Placement]:
        """The sharded placements in which every operator can take the parameter."""
        taken = [
            {option.needs[position] for option in vertex.options}
            for vertex in self.problem.vertices
            for position, value in enumerate(vertex.needs)
            if value in keys
        ]
        common = set.intersection(*taken) if taken else set()
        return sorted(placement for placement in common if placement.kind == "S")

    def why_not_sharded(self, keys: list[Key], dim: int) -> str:
        """Why a parameter, the values ``keys``, cannot be stored sharded on ``dim``."""
        for vertex, subject in zip(self.problem.vertices, self.problem.subjects, strict=True):
            for position, (i, value) in enumerate(vertex.needs):
                taken = [option.needs[position] for option in vertex.options]
                if (i, value) in keys and not any(p.kind == "S" and p.dim == dim for p in taken):
                    _, node = subject
                    return why_whole(node, self.facts[i].rules[node], value, dim, self.world_size)
        return "its readers do not agree on a way"

    def _replicated_cost(self, param: Value) -> float:
        """Price of a parameter that every rank holds; what is small beside a matrix is cheap."""
        size = bytes_of(param)
        share = size / self._largest_matrix_bytes()
        held_twice = size * (self.world_size - 1) / self.world_size
        return held_twice * share * H100.replicated_byte_us

    def _largest_matrix_bytes(self) -> int:
        """Of the parameters with two dims; those with more are stacks of them, if there are any."""
        params = [
            node
            for region in self.regions
            for node, kind in zip(region.placeholders, region.input_kinds, strict=True)
            if kind == "param"
        ]
        matrices = [node for node in params if node.meta["val"].ndim == 2]
        return max(bytes_of((node, 0)) for node in matrices or params)

    def _needed(self, keys: list[Key], kind: str) -> list[Placement]:
        """Placements of ``kind`` that any operator can take one of the values in."""
        found: dict[Placement, None] = {}
        for vertex in self.problem.vertices:
            for position, value in enumerate(vertex.needs):
                if value in keys:
                    found.update(dict.fromkeys(o.needs[position] for o in vertex.options))
        return sorted(p for p in found if p.kind == kind)

    def _add_boundaries(self) -> None:
        classes = _Classes()
        for call in self.program.calls:
            i = self.index[id(call.region)]
            for position, (node, ref) in enumerate(
                zip(call.region.placeholders, call.args, strict=True)
            ):
                if ref.kind == "call" and (node, 0) in self.facts[i].active:
                    producer = self.index[id(self.program.calls[ref.index].region)]
                    classes.union(("out", producer, ref.output), ("in", i, position))
                elif ref.kind == "input" and (node, 0) in self.facts[i].active:
                    self.problem.add(
                        ("input", ref.index), Vertex((), ((i, (node, 0)),), [Option((), (I,), 0.0)])
                    )
        numbers = classes.numbered()
        for number in dict.fromkeys(numbers.values()):
            members = [item for item, n in numbers.items() if n == number]
            self._add_boundary(number, members)

    def _add_boundary(self, number: int, members: list[tuple[str, int, int]]) -> None:
        for item in members:
            self.problem.boundary_class[item] = number
        outs = [
            (i, value_of(self.regions[i].outputs[k])) for side, i, k in members if side == "out"
        ]
        ins = [(i, (self.regions[i].placeholders[k], 0)) for side, i, k in members if side == "in"]
        rows = self.facts[ins[0][0]].num_rows(ins[0][1])
        if rows:
            # The residual stream: sharded by rows or whole, never by features, which norms mix.
            allowed = [T(rows), I, R] if self.sequence_parallel else [I, R]
        else:
            allowed = [*self._needed(ins, "S"), I, R]
        kept = sum(
            bytes_of(value) * self._scale_of(i, value) * self.num_calls[i] for i, value in outs
        )
        kept *= (self.world_size - 1) / self.world_size * H100.kept_byte_us
        options = [
            Option((p,) * len(outs), (p,) * len(ins), 0.0 if p.is_sharded else kept)
            for p in allowed
        ]
        self.problem.add(("boundary", number), Vertex(tuple(outs), tuple(ins), options))

    def _add_outputs(self) -> None:
        for index, ref in enumerate(self.program.outputs):
            if not isinstance(ref, Ref) or ref.kind != "call":
                continue
            i = self.index[id(self.program.calls[ref.index].region)]
            value = value_of(self.regions[i].outputs[ref.output])
            if value not in self.facts[i].active:
                continue
            allowed = [I]
            if self.shard_outputs(index):
                dims, shape = self._feature_dims(i, value), shape_of(value)
                allowed += [shard_of(shape[dim], dim, self.world_size) for dim in dims]
            options = [Option((p,), (), 0.0) for p in allowed]
            self.problem.add(("output", index), Vertex(((i, value),), (), options))

    def _feature_dims(self, i: int, value: Value) -> list[int]:
        facts, rank = self.facts[i], len(shape_of(value))
        return [
            d
            for d in range(rank)
            if (value, d) in facts.features and (value, d) not in facts.tokens
        ]
