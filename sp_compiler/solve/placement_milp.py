"""Choice of placements as a 0/1 linear program, solved by HiGHS through ``scipy.optimize.milp``.

For problems in which so many values are live at once that the tables of
:mod:`sp_compiler.solve.elimination` grow without bound, such as the scan of a Mamba layer. On all
others it finds the same objective and takes 1 to 50 times as long (Llama 0.06 s of CPU on 2 ranks
and 2.2 s on 8, where elimination takes 0.06 s: ``python -m benchmarks.solver_ways placement``), so
elimination is tried first.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from sp_compiler.base.placement import Placement
from sp_compiler.solve.placement_problem import ConversionCost, NoChoiceError, ValueName, Vertex


class _Rows:
    """Sparse constraint rows ``lower <= A x <= upper`` under construction."""

    def __init__(self) -> None:
        self.data: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.data += [(len(self.lower), column, factor) for column, factor in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, num_columns: int) -> LinearConstraint:
        rows, columns, factors = zip(*self.data, strict=True)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.lower), num_columns))
        return LinearConstraint(matrix, np.array(self.lower), np.array(self.upper))


# Total number of columns in all linear programs of one search: about ten seconds. It limits steps,
# not time, so that every rank stops at the same point.
_MAX_COLUMNS = 100_000
_CUT_SHORT = (1, 4)  # scipy's status: a limit was reached, or "other", as for the limit of nodes


def solve_integer_program(
    vertices: list[Vertex], conversion_cost: ConversionCost
) -> tuple[list[int], float]:
    """Choose an option of each vertex.

    Args:
        vertices: every value is made by exactly one vertex.
        conversion_cost: see :data:`sp_compiler.solve.placement_problem.ConversionCost`.

    Returns:
        The index of each option, and a bound on how much costlier they are than the best, relative:
        0 unless the search was cut short.

    Raises:
        NoChoiceError: no choice satisfies every need.
    """
    columns: list[float] = []
    first: list[int] = []
    for vertex in vertices:
        first.append(len(columns))
        # The tiny slope makes the first of several equal optima the only one, on every rank.
        columns += [option.cost_us + 1e-6 * i for i, option in enumerate(vertex.options)]
    num_binary = len(columns)
    rows = _Rows()
    for start, vertex in zip(first, vertices, strict=True):  # exactly one option each
        rows.add([(start + i, 1.0) for i in range(len(vertex.options))], 1, 1)
    made, needed = _makers(vertices, first), _consumers(vertices, first)
    for value, wants in needed.items():
        for target, consumers in wants.items():
            # One flow per (value, source, target), shared by all consumers: it is paid once.
            flows: list[tuple[int, float]] = []
            for source, makers in made[value].items():
                cost = 0.0 if source == target else conversion_cost(value, source, target)
                if cost is None:
                    continue
                flow = len(columns)
                columns.append(cost)
                flows.append((flow, 1.0))
                # From a source only if the maker makes it there ...
                rows.add([(flow, 1.0), *((maker, -1.0) for maker in makers)], -np.inf, 0)
            for options in consumers:
                # ... and to the target wherever a chosen option needs it there.
                rows.add([*flows, *((option, -1.0) for option in options)], 0, np.inf)
    result = _search(columns, rows, num_binary)
    spans = zip(first, vertices, strict=True)
    choices = [int(np.argmax(result.x[at : at + len(vertex.options)])) for at, vertex in spans]
    return choices, float(result.mip_gap) if result.status in _CUT_SHORT else 0.0


def _search(columns: list[float], rows: _Rows, num_binary: int) -> Any:
    """Result of the integer program; ``columns`` are the costs, the first ones choices."""
    # Flows are integral automatically once the options are.
    integrality = np.zeros(len(columns))
    integrality[:num_binary] = 1
    search = functools.partial(
        milp,
        np.array(columns),
        constraints=[rows.constraint(len(columns))],
        integrality=integrality,
        bounds=Bounds(0, 1),
    )
    options = {"mip_rel_gap": 1e-7}
    result = search(options={**options, "node_limit": -(-_MAX_COLUMNS // len(columns))})
    # Cut short before it found any solution: only a full search is left.
    if result.x is None and result.status in _CUT_SHORT:
        result = search(options=options)
    if result.x is None:
        raise NoChoiceError(result.message)
    return result


def _makers(
    vertices: list[Vertex], first: list[int]
) -> dict[ValueName, dict[Placement, list[int]]]:
    """By value, the columns of the options that make it in each placement."""
    return {
        value: _columns(start, [option.makes[position] for option in vertex.options])
        for start, vertex in zip(first, vertices, strict=True)
        for position, value in enumerate(vertex.makes)
    }


def _consumers(
    vertices: list[Vertex], first: list[int]
) -> dict[ValueName, dict[Placement, list[list[int]]]]:
    """By value, the columns of the options that need it in each placement, a list per consumer."""
    table: dict[ValueName, dict[Placement, list[list[int]]]] = {}
    for start, vertex in zip(first, vertices, strict=True):
        for position, value in enumerate(vertex.needs):
            columns = _columns(start, [option.needs[position] for option in vertex.options])
            for placement, options in columns.items():
                table.setdefault(value, {}).setdefault(placement, []).append(options)
    return table


def _columns(start: int, placements: list[Placement]) -> dict[Placement, list[int]]:
    """By placement, the columns from ``start`` on that stand for options with it."""
    columns: dict[Placement, list[int]] = {}
    for column, placement in enumerate(placements, start):
        columns.setdefault(placement, []).append(column)
    return columns
