"""Choice of placements as a 0/1 linear program on plain data; knows no graph and no operator.

Every vertex (an operator, a parameter, a value that crosses regions) runs by exactly one of its
options. Each (value, placement) that some consumer needs is made once, either because the producer
makes it or by a conversion from what it makes. Solved by HiGHS through ``scipy.optimize.milp``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from sp_compiler.errors import SPCompilerError
from sp_compiler.placement import Placement

Value = Hashable
ConversionCost = Callable[[Any, Placement, Placement], "float | None"]


@dataclass(frozen=True)
class Option:
    """One way to run a vertex: a placement for each needed and each made value; cost in us."""

    needs: tuple[Placement, ...]
    makes: tuple[Placement, ...]
    cost_us: float


@dataclass
class Vertex:
    """``needs`` and ``makes`` name values, in the order of the options' placements."""

    needs: tuple[Value, ...]
    makes: tuple[Value, ...]
    options: list[Option] = field(default_factory=list)


@dataclass(frozen=True)
class Solution:
    """Index of the chosen option of each vertex, and the objective in us."""

    choices: list[int]
    cost_us: float


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


_MAX_MERGED_OPTIONS = 24


@dataclass
class _Merged:
    """A vertex that stands for several; ``picks[i]``: (vertex, option) pairs of option ``i``."""

    vertex: Vertex
    picks: list[dict[int, int]]


def merge_chains(vertices: list[Vertex], conversion_cost: ConversionCost) -> list[_Merged]:
    """Join each vertex with the only reader of its only result, exactly.

    The conversion between the two is paid inside; of all pairs of options with the same outside
    only the cheapest is kept. Chains of pointwise operators shrink to one vertex.
    """
    merged = [
        _Merged(vertex, [{number: i} for i in range(len(vertex.options))])
        for number, vertex in enumerate(vertices)
    ]
    readers: dict[Value, list[int]] = defaultdict(list)
    for number, vertex in enumerate(vertices):
        for value in vertex.needs:
            readers[value].append(number)
    home = list(range(len(vertices)))
    for number, vertex in enumerate(vertices):
        if len(vertex.makes) != 1 or len(readers[vertex.makes[0]]) != 1:
            continue
        reader = readers[vertex.makes[0]][0]
        while home[reader] != reader:
            reader = home[reader]
        joined = _join(merged[number], merged[reader], conversion_cost)
        if joined is not None:
            merged[reader] = joined
            home[number] = reader
    return [item for number, item in enumerate(merged) if home[number] == number]


def _join(maker: _Merged, reader: _Merged, conversion_cost: ConversionCost) -> _Merged | None:
    (value,) = maker.vertex.makes
    position = reader.vertex.needs.index(value)
    best: dict[tuple[object, object], tuple[Option, dict[int, int]]] = {}
    for i, first in enumerate(maker.vertex.options):
        for j, second in enumerate(reader.vertex.options):
            source, target = first.makes[0], second.needs[position]
            between = 0.0 if source == target else conversion_cost(value, source, target)
            if between is None:
                continue
            needs = (*first.needs, *second.needs[:position], *second.needs[position + 1 :])
            option = Option(needs, second.makes, first.cost_us + between + second.cost_us)
            key = (needs, second.makes)
            if key not in best or option.cost_us < best[key][0].cost_us:
                best[key] = (option, maker.picks[i] | reader.picks[j])
    if not best or len(best) > _MAX_MERGED_OPTIONS:
        return None
    names = reader.vertex.needs
    values = (*maker.vertex.needs, *names[:position], *names[position + 1 :])
    options = [option for option, _ in best.values()]
    return _Merged(
        Vertex(values, reader.vertex.makes, options), [picks for _, picks in best.values()]
    )


def solve(vertices: list[Vertex], conversion_cost: ConversionCost) -> Solution:
    """The cheapest choice of options.

    Args:
        vertices: every value is made by exactly one vertex, before the vertices that need it.
        conversion_cost: us to make a value's second placement from the first; ``None``: impossible.

    Raises:
        SPCompilerError: no choice satisfies every need.
    """
    if not vertices:
        return Solution([], 0.0)
    merged = merge_chains(vertices, conversion_cost)
    reduced = _solve([item.vertex for item in merged], conversion_cost)
    picks: dict[int, int] = {}
    for item, choice in zip(merged, reduced.choices, strict=True):
        picks |= item.picks[choice]
    return Solution([picks[number] for number in range(len(vertices))], reduced.cost_us)


def _solve(vertices: list[Vertex], conversion_cost: ConversionCost) -> Solution:
    """As :func:`solve`, every vertex taken as it is.

    Args:
        vertices: every value is made by exactly one vertex.
        conversion_cost: us to make a value's second placement from the first; ``None``: impossible.

    Raises:
        SPCompilerError: no choice satisfies every need.
    """
    columns: list[float] = []
    first: list[int] = []
    for vertex in vertices:
        first.append(len(columns))
        # The tiny slope makes the first of several equal optima the only one, on every rank.
        columns += [option.cost_us + 1e-6 * i for i, option in enumerate(vertex.options)]
    num_binary = len(columns)
    rows = _Rows()
    for start, vertex in zip(first, vertices, strict=True):
        rows.add([(start + i, 1.0) for i in range(len(vertex.options))], 1, 1)
    made = _placements(vertices, first, make=True)
    needed = _placements(vertices, first, make=False)
    for value, wants in needed.items():
        for target, consumers in wants.items():
            sources: list[tuple[int, float]] = []
            for source, makers in made[value].items():
                cost = 0.0 if source == target else conversion_cost(value, source, target)
                if cost is None:
                    continue
                flow = len(columns)
                columns.append(cost)
                sources.append((flow, 1.0))
                rows.add([(flow, 1.0), *((maker, -1.0) for maker in makers)], -np.inf, 0)
            for options in consumers:
                rows.add([*sources, *((option, -1.0) for option in options)], 0, np.inf)
    integrality = np.zeros(len(columns))
    integrality[:num_binary] = 1
    result = milp(
        np.array(columns),
        constraints=[rows.constraint(len(columns))],
        integrality=integrality,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-7},
    )
    if result.x is None:
        raise SPCompilerError(f"no placement satisfies every operator: {result.message}")
    choices = [
        int(np.argmax(result.x[start : start + len(vertex.options)]))
        for start, vertex in zip(first, vertices, strict=True)
    ]
    return Solution(choices, float(result.fun))


def _placements(
    vertices: list[Vertex], first: list[int], *, make: bool
) -> dict[Value, dict[Placement, list]]:  # type: ignore[type-arg]
    """Columns of the options that make (a flat list) or need (one list a consumer) a placement."""
    table: dict[Value, dict[Placement, list]] = defaultdict(lambda: defaultdict(list))  # type: ignore[type-arg]
    for start, vertex in zip(first, vertices, strict=True):
        for position, value in enumerate(vertex.makes if make else vertex.needs):
            chosen: dict[Placement, list[int]] = defaultdict(list)
            for index, option in enumerate(vertex.options):
                placements = option.makes if make else option.needs
                chosen[placements[position]].append(start + index)
            for placement, options in chosen.items():
                if make:
                    table[value][placement] += options
                else:
                    table[value][placement].append(options)
    return table
