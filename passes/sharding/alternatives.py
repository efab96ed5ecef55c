"""Alternatives to the choices of a solved placement problem, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from sp_compiler.base.errors import SPCompilerError
from sp_compiler.ir.compiled_program import PassedOver
from sp_compiler.ir.program import Program
from sp_compiler.passes.sharding.problem import OperatorSubject, ProblemBuilder
from sp_compiler.planning.fallbacks import forward_flops, is_product
from sp_compiler.solve.placement import Solution, solve
from sp_compiler.solve.placement_problem import Conversion, conversions

# Each estimate is one more solution of the entire problem, 0.02 to 0.3 s: made only for matmuls
# that take a considerable part of a step, and for no more of them than a warning lists.
_MOST_ESTIMATES = 8
_ESTIMATED_SHARE = 0.01


class Alternatives:
    """A solved problem, and the changes in cost if a vertex is forced to other options.

    Args:
        builder: the builder of the problem.
        best: the chosen option of each vertex.
    """

    def __init__(self, builder: ProblemBuilder, best: Sequence[int]) -> None:
        self._vertices = builder.problem.vertices
        self._subjects = builder.problem.subjects
        self._conversion_us = builder.prices.conversion_us
        self._best = list(best)

    def forced(self, number: int, indices: Sequence[int]) -> list[int] | None:
        """Return the cheapest choices with one of the options ``indices`` of a vertex; ``None`` if
        there are none."""
        if self._best[number] in indices:
            return self._best
        # Everything else is solved again around the remaining options.
        vertex = self._vertices[number]
        only = replace(vertex, options=[vertex.options[index] for index in indices])
        vertices = [*self._vertices[:number], only, *self._vertices[number + 1 :]]
        try:
            choices = solve(vertices, self._conversion_us).choices
        except SPCompilerError:
            return None
        return [*choices[:number], indices[choices[number]], *choices[number + 1 :]]

    def more(self, choices: list[int]) -> PassedOver:
        """Return what ``choices`` cost more than the best ones."""
        costs = zip(self._costs(choices), self._costs(self._best), strict=True)
        return PassedOver(*(forced - best for forced, best in costs))

    def _costs(self, choices: list[int]) -> tuple[float, float, float]:
        """Communication, compute and the price of memory, in us."""
        # Costs of the entire program: a choice here may move costs anywhere else. Only operators
        # compute; options of parameters and of values between regions are priced for their memory.
        paid = sum(map(self.price_us, conversions(self._vertices, choices)))
        costs = [v.options[i].cost_us for v, i in zip(self._vertices, choices, strict=True)]
        kinds = zip(costs, self._subjects, strict=True)
        compute = [cost for cost, subject in kinds if isinstance(subject, OperatorSubject)]
        return paid, sum(compute), sum(costs) - sum(compute)

    def price_us(self, conversion: Conversion) -> float:
        """Return the price of a conversion, infinity if it is impossible."""
        cost = self._conversion_us(*conversion)
        return math.inf if cost is None else cost

    def extra(self, choices: list[int]) -> list[Conversion]:
        """Return conversions that the best choices do not need, costliest first, without free
        ones."""
        usual = set(conversions(self._vertices, self._best))
        extra = [item for item in conversions(self._vertices, choices) if item not in usual]
        return sorted(filter(self.price_us, extra), key=self.price_us, reverse=True)


def passed_over(
    program: Program, builder: ProblemBuilder, solution: Solution
) -> dict[tuple[str, str], PassedOver | None]:
    """Return, for each matmul that runs replicated, what the cheapest way to shard it would cost.

    Matmuls that no strategy shards are absent; ``None``: there is a strategy, but its cost was not
    estimated, because the matmul is small or a solution takes long.

    Args:
        program: the one that ``builder`` places.
    """
    problem, alternatives = builder.problem, Alternatives(builder, solution.choices)
    found: dict[tuple[str, str], PassedOver | None] = {}
    sharding: dict[int, list[int]] = {}
    flops: dict[int, float] = {}
    for number, (subject, strategies) in enumerate(
        zip(problem.subjects, problem.strategies, strict=True)
    ):
        if not isinstance(subject, OperatorSubject) or not is_product(subject.node):
            continue
        calls = builder.prices.num_calls[subject.region]
        flops[number] = forward_flops(subject.node) * calls
        ways = [index for index, strategy in enumerate(strategies) if strategy.is_sharded]
        if ways and strategies[solution.choices[number]].is_replicated:
            sharding[number] = ways
    estimated = _largest(flops, sharding) if solution.is_eliminated else ()
    for number, ways in sharding.items():
        choices = alternatives.forced(number, ways) if number in estimated else None
        subject = problem.subjects[number]
        assert isinstance(subject, OperatorSubject)
        key = program.regions[subject.region].name, subject.node.name
        found[key] = None if choices is None else alternatives.more(choices)
    return found


def _largest(flops: dict[int, float], numbers: Collection[int]) -> list[int]:
    """Return the largest of ``numbers`` by ``flops`` that are worth an estimate."""
    least = _ESTIMATED_SHARE * sum(flops.values())
    worth = [number for number in numbers if flops[number] >= least]
    return sorted(worth, key=flops.__getitem__, reverse=True)[:_MOST_ESTIMATES]
