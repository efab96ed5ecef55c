"""Construction of the placement problem of a program: vertices, their options, prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import I, P, Placement, R, T, shard_of
from sp_compiler.cost.hardware import Hardware
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.graph_theory import connected
from sp_compiler.ir.hints import placement_text
from sp_compiler.ir.program import Program
from sp_compiler.passes.sharding.dim_roles import (
    RegionValues,
    Value,
    operators,
    residual_stream,
    results_of,
    value_of,
    value_shape,
)
from sp_compiler.passes.sharding.factor_offers import FactorOffers
from sp_compiler.passes.sharding.prices import Key, Prices
from sp_compiler.passes.sharding.reasons import why_replicated
from sp_compiler.passes.sharding.units import split_units
from sp_compiler.rules.padding import may_pad
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.vocabulary import vocabulary_strategies
from sp_compiler.solve.placement_problem import Option, Vertex


@dataclass(frozen=True)
class OperatorSubject:
    """An operator of a region."""

    region: int
    node: Node


@dataclass(frozen=True)
class ParameterSubject:
    """A parameter, or several that calls of a region read at the same position: all have one
    placement."""

    number: int


@dataclass(frozen=True)
class CrossingSubject:
    """A value passed from regions that make it to regions that read it."""

    number: int


@dataclass(frozen=True)
class InputSubject:
    """A place of a region where calls pass an input of the model that needs a gradient."""

    region: int
    position: int


@dataclass(frozen=True)
class OutputSubject:
    """An output of the model."""

    index: int


Subject = OperatorSubject | ParameterSubject | CrossingSubject | InputSubject | OutputSubject


@dataclass(frozen=True)
class Port:
    """An input or an output of a region, where values cross."""

    side: Literal["in", "out"]
    region: int
    position: int


@dataclass
class Problem:
    """The vertices and the subject of each, in the same order.

    Attributes:
        strategies: for operators, the strategy of each option; empty for other subjects.
        readers: the vertices that need a value, each with its position among their needs.
        makers: the vertex that makes a value, with its position among the values it makes.
        parameters: the subject of each parameter, by name.
        crossings: the subject of each port.
    """

    vertices: list[Vertex] = field(default_factory=list)
    subjects: list[Subject] = field(default_factory=list)
    # The solver sees only the vertices; the other fields lead from its choices back to the graph.
    strategies: list[list[Strategy]] = field(default_factory=list)
    readers: dict[Key, list[tuple[Vertex, int]]] = field(default_factory=dict)
    makers: dict[Key, tuple[Vertex, int]] = field(default_factory=dict)
    parameters: dict[str, ParameterSubject] = field(default_factory=dict)
    crossings: dict[Port, CrossingSubject] = field(default_factory=dict)

    def add(self, subject: Subject, vertex: Vertex, strategies: Sequence[Strategy] = ()) -> None:
        """Append a vertex and the ``strategies`` of its options."""
        self.vertices.append(vertex)
        self.subjects.append(subject)
        self.strategies.append(list(strategies))
        for position, value in enumerate(vertex.needs):
            self.readers.setdefault(value, []).append((vertex, position))
        for position, value in enumerate(vertex.makes):
            self.makers[value] = vertex, position


class ProblemBuilder:
    """Builds the :class:`Problem` of a program with all its regions.

    Args:
        program: unsharded.
        facts: by ``id(region)``, see :mod:`sp_compiler.passes.sharding.dim_roles`.
        world_size: number of ranks.
        sequence_parallel: whether values may be sharded by token rows.
        nominal_tokens: see :class:`~sp_compiler.passes.sharding.prices.Prices`.
        shard_outputs: whether the model's output ``i`` may stay sharded.
        fixed: storage placements decided by an earlier compilation.
        hardware: see :class:`~sp_compiler.passes.sharding.prices.Prices`.
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
        hardware: Hardware,
    ) -> None:
        self.program = program
        self.regions = program.regions
        self.index = {id(region): i for i, region in enumerate(self.regions)}
        self.facts = [facts[id(region)] for region in self.regions]
        self.world_size = world_size
        self.prices = Prices(program, self.facts, world_size, nominal_tokens, fixed, hardware)
        self.problem = Problem()
        self._sequence_parallel = sequence_parallel
        # Plain tensor parallelism: elementwise operators get no sharded strategies for these.
        self._unsharded = {} if sequence_parallel else residual_stream(program, facts)
        self._shard_outputs = shard_outputs
        self._fixed = fixed

    def build(self) -> Problem:
        """Add all vertices, operators first: parameters and crossings depend on what operators
        accept."""
        for i, region in enumerate(self.regions):
            for node in operators(region):
                if node in self.facts[i].rules:
                    self._add_operator(i, node)
        self._add_params()
        self._add_boundaries()
        self._add_outputs()
        return self.problem

    def why_not_sharded(self, keys: list[Key], dim: int) -> str:
        """Explain why a parameter, the values ``keys``, cannot be stored sharded on ``dim``."""
        # The first reader that has no strategy for it; if each has one, they differ in segments.
        for vertex, subject in zip(self.problem.vertices, self.problem.subjects, strict=True):
            for position, (i, value) in enumerate(vertex.needs):
                taken = [option.needs[position] for option in vertex.options]
                if (i, value) in keys and not any(p.kind == "S" and p.dim == dim for p in taken):
                    assert isinstance(subject, OperatorSubject)
                    rule = self.facts[i].rules[subject.node]
                    return why_replicated(subject.node, rule, value, dim, self.world_size)
        return "its readers accept no common placement"

    # Operators.

    def _add_operator(self, i: int, node: Node) -> None:
        facts = self.facts[i]
        operands = [value_of(operand) for operand in tensor_operands(node)]
        results = results_of(node)
        active = [value in facts.active for value in operands]
        made = [value in facts.active for value in results]
        # Values that every rank computes by itself are neither partial sums nor sharded.
        possible = [
            strategy
            for strategy in self._strategies(i, node, operands, results)
            if not any(p == P and not a for p, a in zip(strategy.operands, active, strict=True))
            and not any(p.is_sharded and not a for p, a in zip(strategy.results, made, strict=True))
        ]
        # Values that are not active are replicated anyway: the solver need not know about them.
        options = [
            Option(
                tuple(p for p, a in zip(s.operands, active, strict=True) if a),
                tuple(p for p, a in zip(s.results, made, strict=True) if a),
                self.prices.operator_us(i, node, operands, results, s),
            )
            for s in possible
        ]
        vertex = Vertex(
            tuple((i, v) for v, a in zip(operands, active, strict=True) if a),
            tuple((i, v) for v, a in zip(results, made, strict=True) if a),
            options,
        )
        self.problem.add(OperatorSubject(i, node), vertex, possible)

    def _strategies(
        self, i: int, node: Node, operands: list[Value], results: list[Value]
    ) -> list[Strategy]:
        facts, rule = self.facts[i], self.facts[i].rules[node]
        is_parameter = self.prices.params[i].__contains__
        # An operator without a rule runs replicated, or by a strategy for vocabularies.
        factors, units = None, list[int]()
        if rule is not None:
            around = (facts, rule, operands, results, self._unsharded, self.world_size)
            factors = FactorOffers(*around)
            if rule.split is not None:
                units = split_units(operands[0], rule.split, facts.segmentations)
        offers = Offers(
            self.world_size,
            lambda factor: factors is not None and factors.shardable(factor),
            lambda factor: factors.segmentations(factor) if factors else (),
            [facts.num_rows(value) for value in operands],
            [facts.num_rows(value) for value in results],
            self._sequence_parallel,
            lambda factor: rule is not None and may_pad(node, rule, factor, is_parameter),
            split_units=units,
        )
        by_rule = strategies(rule, len(operands), len(results), offers)
        return by_rule + vocabulary_strategies(
            node, self.world_size, lambda dim: (operands[0], dim) in facts.features
        )

    # Parameters.

    def _add_params(self) -> None:
        # A position of a region has one placement in all calls, and a parameter has one at all
        # positions: everything that is tied this way is one vertex.
        uses: list[tuple[tuple[int, int] | str, tuple[int, int] | str]] = []
        for call in self.program.calls:
            i = self.index[id(call.region)]
            uses += [
                ((i, position), ref.name)
                for position, ref in enumerate(call.args)
                if ref.kind == "param"
            ]
        for number, members in enumerate(connected(uses)):
            names = [item for item in members if isinstance(item, str)]
            places = sorted(item for item in members if not isinstance(item, str))
            subject = ParameterSubject(number)
            self.problem.parameters.update(dict.fromkeys(names, subject))
            keys: list[Key] = [(i, (self.regions[i].placeholders[p], 0)) for i, p in places]
            fixed = [self._fixed[name] for name in names if name in self._fixed][:1]
            options = [
                Option(
                    (),
                    (placement,) * len(keys),
                    self.prices.stored_us(keys[0][1], placement) * len(names),
                )
                for placement in fixed or self._allowed(names[0], keys)
            ]
            self.problem.add(subject, Vertex((), tuple(keys), options))

    def _allowed(self, name: str, keys: list[Key]) -> list[Placement]:
        """Return the placements of a parameter that all readers accept and hints allow.

        Raises:
            ArgumentError: hints rule out all of them.
        """
        # Parameters are never gathered: a shard that some reader cannot take is not an option.
        # Sorted, because the order of a set differs from rank to rank.
        taken = [set(placements) for placements in self._taken(keys)]
        common = set.intersection(*taken) if taken else set()
        # Dim 0 of experts is not for tp: all ranks of "tp" hold the same experts, split over "ep".
        first = 1 if name in self.program.experts else 0
        offered = [I, *sorted(p for p in common if p.kind == "S" and p.dim >= first)]
        wish = self.program.wishes.get(name)
        allowed = [p for p in offered if wish is None or wish.allows(p)]
        if not allowed:
            assert wish is not None
            # A wish that forbids replication asks for at least one dim.
            shape, ways = value_shape(keys[0][1]), dict.fromkeys(map(placement_text, offered))
            wanted = wish.allowed[1:].index(True)
            raise ArgumentError(
                f"{wish} cannot be met on {self.world_size} ranks: parameter {name!r} {shape} can "
                f"be {' or '.join(ways)}; {self.why_not_sharded(keys, wanted)}"
            )
        return allowed

    def _taken(self, keys: list[Key]) -> Iterable[list[Placement]]:
        """Yield for each reader the placements in which it accepts one of the values."""
        for key in keys:
            for vertex, position in self.problem.readers.get(key, ()):
                yield [option.needs[position] for option in vertex.options]

    def _made(self, keys: list[Key]) -> Iterable[Placement]:
        """Yield the placements in which one of the values is made."""
        for key in keys:
            # A region's unmodified input is made by a crossing, which may not be known yet.
            if key in self.problem.makers:
                vertex, position = self.problem.makers[key]
                yield from (option.makes[position] for option in vertex.options)

    # Values that cross regions, inputs, outputs.

    def _add_boundaries(self) -> None:
        crossings: list[tuple[Port, Port]] = []
        places: dict[InputSubject, Key] = {}
        for call in self.program.calls:
            i = self.index[id(call.region)]
            for position, (node, ref) in enumerate(call.inputs):
                if (node, 0) not in self.facts[i].active:
                    continue
                if ref.kind == "call":
                    producer = self.index[id(self.program.calls[ref.index].region)]
                    crossings.append((Port("out", producer, ref.output), Port("in", i, position)))
                elif ref.kind == "input":
                    # Once, however many equal layers read an input at this position.
                    places[InputSubject(i, position)] = (i, (node, 0))
        # The user passes inputs in full on every rank and expects a full gradient.
        for subject, value in places.items():
            self.problem.add(subject, Vertex((), (value,), [Option((), (I,), 0.0)]))
        # One placement for a port in all calls, since all calls share the code: the ports of a
        # chain of equal layers are one vertex.
        for number, ports in enumerate(connected(crossings)):
            self._add_crossing(CrossingSubject(number), ports)

    def _add_crossing(self, subject: CrossingSubject, ports: list[Port]) -> None:
        self.problem.crossings.update(dict.fromkeys(ports, subject))
        outs: list[Key] = [
            (port.region, value_of(self.regions[port.region].outputs[port.position]))
            for port in ports
            if port.side == "out"
        ]
        ins: list[Key] = [
            (port.region, (self.regions[port.region].placeholders[port.position], 0))
            for port in ports
            if port.side == "in"
        ]
        rows = self.facts[ins[0][0]].num_rows(ins[0][1])
        if rows:
            # The residual stream: sharded by rows or unsharded, never by features, which norms mix.
            allowed = [T(rows), I, R] if self._sequence_parallel else [I, R]
        else:
            # Any placement that some reader can take or some maker makes: even if all readers
            # gather it, the shard is what is saved for backward; conversions serve the others.
            # Sorted, as above.
            taken = {placement for placements in self._taken(ins) for placement in placements}
            made = {p for p in self._made(outs) if p.kind == "S"}
            allowed = [*sorted({p for p in taken if p.kind == "S"} | made), I, R]
        saved_us = self.prices.saved_us(outs)
        options = [
            Option((p,) * len(outs), (p,) * len(ins), 0.0 if p.is_sharded else saved_us)
            for p in allowed
        ]
        self.problem.add(subject, Vertex(tuple(outs), tuple(ins), options))

    def _add_outputs(self) -> None:
        for index, ref in self.program.call_outputs.items():
            i = self.index[id(self.program.calls[ref.index].region)]
            value, facts = value_of(self.regions[i].outputs[ref.output]), self.facts[i]
            if value not in facts.active:
                continue
            allowed = [I]
            # Only by features, such as the vocabulary of logits: rows of flattened tokens are not
            # a dim of an output.
            if self._shard_outputs(index):
                allowed += [
                    shard_of(size, dim, self.world_size)
                    for dim, size in enumerate(value_shape(value))
                    if (value, dim) in facts.features and (value, dim) not in facts.tokens
                ]
            options = [Option((p,), (), 0.0) for p in allowed]
            self.problem.add(OutputSubject(index), Vertex(((i, value),), (), options))
