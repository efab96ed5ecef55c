"""Explanations why a parameter is sharded or not, by solving the placement problem again.

This happens only when a user asks; the sharding pass stores nothing for it. The cost of an
alternative is the optimum of a separate problem, which the pass never solves. The 8 to 20
alternatives for the largest weight of a GPT, a Llama, a T5 or a BERT take half a second of CPU time
(T5: 3.8 s; ``python -m benchmarks.solver_ways explain``), which each compilation would pay for each
weight.

Each placement of the parameter and each strategy of its readers is forced in turn, and everything
else is optimized around it: the difference from the optimum is the cost of that alternative.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from sp_compiler.base.placement import Placement
from sp_compiler.base.provenance import module_path
from sp_compiler.base.units import time_text
from sp_compiler.ir.hints import named_or_inside, placement_text
from sp_compiler.ir.op_traits import is_view
from sp_compiler.ir.program import Program
from sp_compiler.ops.convert import conversion_between
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.alternatives import Alternatives
from sp_compiler.passes.sharding.dim_roles import ReplicatedNode, value_bytes
from sp_compiler.passes.sharding.outputs import route_outputs
from sp_compiler.passes.sharding.prices import Key
from sp_compiler.passes.sharding.problem import OperatorSubject
from sp_compiler.passes.sharding.reasons import operator_text, why_replicated
from sp_compiler.passes.sharding.shard import placement_problem
from sp_compiler.planning.placement_explanation import (
    Explanation,
    OperatorWays,
    ParameterExplanation,
    Way,
    cost_text,
)
from sp_compiler.solve.placement import solve
from sp_compiler.solve.placement_problem import Conversion


def explain(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement],
    replicated: Collection[ReplicatedNode],
    name: str,
) -> Explanation:
    """Explain why the parameters of a name are placed as they are.

    Args:
        program: unsharded.
        options: options of the compilation.
        fixed: placements that an earlier compilation decided.
        replicated: operators that the compilation had to run replicated.
        name: name of a parameter or module of the user's model, possibly with ``*`` as in hints.

    Raises:
        ArgumentError: no such name; the message suggests similar ones.
    """
    names = _parameters_of(program, name)
    if options.tp == 1:
        reason = "one rank holds everything"
        answers = [_unexplained(program, item, "Replicate()", reason) for item in names]
        return Explanation(name, 1, tuple(answers))
    question = _Question(program, options, fixed, replicated)
    return Explanation(name, options.tp, tuple(map(question.answer, names)))


def _parameters_of(program: Program, name: str) -> list[str]:
    """Return parameters of this name and those inside modules of this name, each once."""
    matching = named_or_inside(name, program.parameters)
    # By stored name, so that a tied parameter is explained once; reversed twice, so that it goes by
    # the first of its names that match.
    return list({program.parameters[item][0]: item for item in reversed(matching)}.values())[::-1]


def _unexplained(program: Program, name: str, placement: str, reason: str) -> ParameterExplanation:
    return ParameterExplanation(name, program.parameters[name][1], placement, reason)


class _Question:
    """A solved problem, and answers about its parameters."""

    def __init__(
        self,
        program: Program,
        options: CompileOptions,
        fixed: dict[str, Placement],
        replicated: Collection[ReplicatedNode],
    ) -> None:
        self.builder = placement_problem(route_outputs(program), options, fixed, replicated)
        self.program = self.builder.program
        self.fixed = fixed
        self.vertices = self.builder.problem.vertices
        self.subjects = self.builder.problem.subjects
        self.best = solve(self.vertices, self.builder.prices.conversion_us).choices
        self.alternatives = Alternatives(self.builder, self.best)

    def answer(self, name: str) -> ParameterExplanation:
        stored_name, shape = self.program.parameters[name]
        # Parameters that a repeated region reads at one position are one subject: stored the same.
        subject = self.builder.problem.parameters.get(stored_name)
        if subject is None:
            return _unexplained(self.program, name, "", "the forward does not use it")
        # One vertex, but a value in each region that reads it.
        vertex = self.subjects.index(subject)
        keys = self._keys(stored_name)
        readers = list(self._readers(keys))
        stored = [self._way(vertex, i, keys) for i in range(len(self.vertices[vertex].options))]
        placement = self.vertices[vertex].options[self.best[vertex]].makes[0]
        return ParameterExplanation(
            name,
            shape,
            placement_text(placement),
            self._reason(stored_name, vertex, keys, stored),
            tuple(stored),
            tuple(self._operator(reader, keys) for reader in readers),
        )

    def _keys(self, name: str) -> list[Key]:
        """Values of the problem that are this parameter, each once: regions repeat."""
        keys: dict[Key, None] = {}
        for call in self.program.calls:
            for node, ref in call.inputs:
                if ref.kind == "param" and ref.name == name:
                    keys[self.builder.index[id(call.region)], (node, 0)] = None
        return list(keys)

    def _readers(self, keys: list[Key]) -> Iterator[int]:
        """Operators that read the parameter, or a view of it."""
        # In graph order, so that the views of a view are known when its readers come.
        views = set(keys)
        for number, (vertex, subject) in enumerate(zip(self.vertices, self.subjects, strict=True)):
            if not isinstance(subject, OperatorSubject) or views.isdisjoint(vertex.needs):
                continue
            if views.issuperset(vertex.needs) and is_view(subject.node):
                views.update(vertex.makes)
            else:
                yield number

    def _operator(self, number: int, keys: list[Key]) -> OperatorWays:
        subject = self.subjects[number]
        assert isinstance(subject, OperatorSubject)
        ways = tuple(self._way(number, k, keys) for k in range(len(self.vertices[number].options)))
        return OperatorWays(
            operator_text(subject.node), self.builder.prices.num_calls[subject.region], ways
        )

    # The cost of one way.

    def _way(self, number: int, index: int, keys: list[Key]) -> Way:
        vertex, chosen = self.vertices[number], index == self.best[number]
        option = vertex.options[index]
        strategies = self.builder.problem.strategies[number]
        # An operator shows how it runs, a parameter how it is stored.
        if strategies:
            operands = tuple(map(str, strategies[index].operands))
            results = tuple(map(str, strategies[index].results))
        else:
            operands, results = (), (stored_text(option.makes[0]),)
        choices = self.alternatives.forced(number, [index])
        if choices is None:  # some other vertex is left without an option
            return Way(
                operands=operands,
                results=results,
                chosen=chosen,
                possible=False,
                more_us=0.0,
                communication_us=0.0,
                compute_us=0.0,
                memory_us=0.0,
                parameter_bytes=0,
                conversions=(),
            )
        more = self.alternatives.more(choices)
        extra = self.alternatives.extra(choices)
        return Way(
            operands=operands,
            results=results,
            chosen=chosen,
            possible=True,
            # Only rounding makes it negative: the optimum costs at most as much as a forced choice.
            more_us=max(0.0, more.communication_us + more.compute_us + more.memory_us),
            communication_us=more.communication_us,
            compute_us=more.compute_us,
            memory_us=more.memory_us,
            parameter_bytes=self._parameter_bytes(keys[0], choices),
            conversions=tuple(map(self._conversion_text, extra)),
        )

    def _parameter_bytes(self, key: Key, choices: list[int]) -> int:
        for vertex, choice in zip(self.vertices, choices, strict=True):
            if key in vertex.makes:
                made = vertex.options[choice].makes[vertex.makes.index(key)]
                return value_bytes(key[1]) // (self.builder.world_size if made.is_sharded else 1)
        raise AssertionError(key)

    def _conversion_text(self, conversion: Conversion) -> str:
        (_, (node, _)), source, target = conversion
        row = conversion_between(source, target)
        # No row: from one sharding to another, through the full value.
        kind = "all-gather and slice" if row is None else row.text
        where = module_path(node)
        of = f"{node.name} in {where}" if where else node.name
        price = time_text(self.alternatives.price_us(conversion))
        return f"{kind} of {of} ({source} to {target}), {price}"

    # In words.

    def _reason(self, name: str, number: int, keys: list[Key], stored: list[Way]) -> str:
        """Text for the placement of a parameter, the strongest reason first."""
        vertex = self.vertices[number]
        placement = vertex.options[self.best[number]].makes[0]
        wish = self.program.wishes.get(name)
        # Decided before any cost was compared: by an earlier compilation, or else by the user.
        if name in self.fixed:
            return "placed by the first compilation, for good"
        if wish is not None and not all(wish.allowed):
            return f"asked for by {wish}"
        others = [
            (way, index)
            for index, (way, option) in enumerate(zip(stored, vertex.options, strict=True))
            if way.possible and placement_text(option.makes[0]) != placement_text(placement)
        ]
        if placement.is_sharded:
            num_bytes = stored[self.best[number]].parameter_bytes
            return _why_sharded([way for way, _ in others], num_bytes)
        if not others:
            rank = len(keys[0][1][0].meta["val"].shape)
            reasons = (self.builder.why_not_sharded(keys, dim) for dim in range(rank))
            return "cannot be sharded: " + "; ".join(dict.fromkeys(reasons))
        return "; ".join(self._costlier(way, number, index) for way, index in others)

    def _costlier(self, way: Way, number: int, index: int) -> str:
        """Text with the extra cost of sharding, the costliest conversion that it needs, and why."""
        choices = self.alternatives.forced(number, [index])
        assert choices is not None  # only possible ways come here
        time_us = way.communication_us + way.compute_us
        text = f"{way.results[0]} would cost {cost_text(time_us, way.memory_us)}"
        # No conversion if computing is what costs more.
        for conversion in self.alternatives.extra(choices)[:1]:
            why = self._why(conversion, choices)
            text += f", with {self._conversion_text(conversion)}{why and f', as {why}'}"
        return text

    def _why(self, conversion: Conversion, choices: list[int]) -> str:
        """Explain why the reader after a conversion needs it; "" if it does not."""
        key, source, target = conversion
        for number, vertex in enumerate(self.vertices):
            subject = self.subjects[number]
            if source.kind != "S" or not isinstance(subject, OperatorSubject):
                continue
            if key not in vertex.needs:
                continue
            position = vertex.needs.index(key)
            taken = [option.needs[position] for option in vertex.options]
            # A reader that could take the source avoids it because of its cost, which is shown.
            if taken[choices[number]] == target and source not in taken:
                i, value = key
                return why_replicated(
                    subject.node,
                    self.builder.facts[i].rules[subject.node],
                    value,
                    source.dim,
                    self.builder.world_size,
                )
        return ""


def _why_sharded(others: Iterable[Way], num_bytes: int) -> str:
    """Text with the extra cost of every other way to store a parameter; a rank has ``num_bytes`` of
    it."""
    chosen_for, costs = "the cheapest way", []
    for way in others:
        time_us = way.communication_us + way.compute_us
        # An alternative that would be faster was rejected only because of its memory.
        if way.memory_us > 0 > round(time_us, 1):
            chosen_for = "chosen for its memory"
        more = cost_text(time_us, way.memory_us, way.parameter_bytes - num_bytes)
        costs.append(f"{way.results[0]} would cost {more}")
    return "; ".join([chosen_for, *costs])


def stored_text(placement: Placement) -> str:
    """Return a placement as a hint, with the sizes of the parts of a fused dim."""
    text, segments = placement_text(placement), placement.segments
    if len(segments) == 1 and not placement.units:
        return f"{text} with padding after {segments[0]}"
    if not segments:
        return text
    # With many parts, such as the heads of a fused projection, the full list would be too long.
    is_even = len(segments) > 3 and len(set(segments)) == 1
    listed = ", ".join(map(str, segments))
    text += f" in {len(segments)} parts of {segments[0]}" if is_even else f" in parts of {listed}"
    padding = f" with padding after the {placement.units} heads of each"
    return text + padding if placement.units else text
