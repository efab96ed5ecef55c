"""The cheapest choice of placements, on plain data; knows no graph and no operator.

Every vertex (an operator, a parameter, a value that crosses regions) uses exactly one of its
options. Each (value, placement) that a consumer needs is made once, either by the producer or by a
conversion of the producer's placement.

There are two exact methods; elimination is tried first. On 94 problems (the test models, ``python
-m benchmarks.solver_ways``) both find the same objective and the same options. Elimination takes 9
s of CPU for all of them, the linear program 42 s: for a third of them more than a tenth of the
compilation, and 10.5 s instead of 0.2 s for T5 on 8 ranks. Elimination alone is not enough: if many
values are live at once, as in a scan, its tables get too wide. Then it runs again with a bound, the
cost of a choice found among only the cheapest rows, and mostly succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from sp_compiler.base.errors import SPCompilerError
from sp_compiler.solve.elimination import Elimination
from sp_compiler.solve.placement_milp import solve_integer_program
from sp_compiler.solve.placement_problem import ConversionCost, NoChoiceError, Vertex, conversions

_ROUGHLY = 100
"""Number of rows kept of each table in the search for a choice that bounds the best one."""


@dataclass(frozen=True)
class Solution:
    """Index of the chosen option of each vertex, and the objective in us.

    ``gap``: bound on how much costlier it is than the optimum, relative; 0 if it is optimal.
    ``is_eliminated``: whether elimination found it at once, which takes a fraction of a second.
    """

    choices: list[int]
    cost_us: float
    gap: float = 0.0
    is_eliminated: bool = True


def solve(vertices: list[Vertex], conversion_cost: ConversionCost) -> Solution:
    """Return the cheapest options, by elimination, or by HiGHS if a table gets too wide.

    Args:
        vertices: every value is made by exactly one vertex.
        conversion_cost: time in us to convert a value from the first placement to the second;
            ``None`` if impossible.

    Raises:
        SPCompilerError: no choice satisfies every need.
    """
    try:
        choices, gap, is_eliminated = None, 0.0, False
        # Elimination joins a value's maker with its readers, which must be other vertices.
        if not any(set(vertex.needs) & set(vertex.makes) for vertex in vertices):
            choices = Elimination(vertices, conversion_cost).run()
            is_eliminated = choices is not None
            if choices is None:
                choices = _eliminated_within_a_bound(vertices, conversion_cost)
        if choices is None:
            choices, gap = solve_integer_program(vertices, conversion_cost)
    except NoChoiceError as error:
        raise SPCompilerError(f"no placement satisfies every operator: {error}") from error
    cost_us = cost_of(vertices, choices, conversion_cost)
    return Solution(choices, cost_us, gap, is_eliminated)


def _eliminated_within_a_bound(
    vertices: list[Vertex], conversion_cost: ConversionCost
) -> list[int] | None:
    rough = Elimination(vertices, conversion_cost, max_rows=_ROUGHLY)
    try:
        if rough.run() is None:
            return None
    except NoChoiceError:  # none among so few rows
        return None
    return Elimination(vertices, conversion_cost, most_us=rough.cost_us).run()


def cost_of(vertices: list[Vertex], choices: list[int], conversion_cost: ConversionCost) -> float:
    """Return the objective of a choice in us."""
    running = sum(v.options[i].cost_us for v, i in zip(vertices, choices, strict=True))
    paid = [conversion_cost(*conversion) for conversion in conversions(vertices, choices)]
    return running + sum(cost for cost in paid if cost is not None)
