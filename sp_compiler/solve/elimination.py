"""Exact solution of a placement problem by elimination, without search, if few values are live.

If one vertex reads a value of another, the two are replaced by one table of all pairs of their
rows. A row is what the rest of the problem can see: the placements that it needs of outside values,
and the placements in which values read outside exist. Equal rows, and rows that another can replace
at no higher cost, are dropped. A transformer layer passes on one or two values, so tables stay
small, and the last one has a single row. T5's 257 vertices on 8 ranks take 0.2 s of CPU, where the
linear program of :mod:`sp_compiler.solve.placement_milp` takes 10 s for the same objective
(``python -m benchmarks.solver_ways placement``). If the cost of some choice is known, elimination
narrows tables that would get too wide: it drops a row that, together with the cheapest rows of all
other tables, costs more than that choice.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sp_compiler.base.placement import Placement
from sp_compiler.solve.placement_problem import ConversionCost, NoChoiceError, ValueName, Vertex

MAX_PAIRS = 4_000_000
"""Pairs of rows that one elimination may examine, about a second."""
_CHEAPEST = 24
"""Number of cheap rows that are tried as a replacement of each costlier one."""
_MAX_KEY = 1 << 62  # for joint states, which are numbered in int64

State = Any
"""State of one value in a row. For a needed value: the set of placements; for a value that is made:
its placement and the set of those that it was converted to. A set is a bit mask."""


@dataclass
class _Column:
    """State of one value in every row: ``states[codes[row]]``."""

    codes: NDArray[np.int64]
    states: list[State]

    @classmethod
    def of(cls, states: Iterable[State]) -> _Column:
        numbers: dict[State, int] = {}
        codes = [numbers.setdefault(state, len(numbers)) for state in states]
        return cls(np.array(codes, np.int64), list(numbers))

    def with_each(self, other: _Column, join: Callable[[State, State], State]) -> _Column:
        """Join the states of every pair of a row of this and one of the other, as a matrix."""
        # Python sees each pair of distinct states once; numpy looks them up for millions of rows.
        small = _Column.of(join(ours, theirs) for ours in self.states for theirs in other.states)
        table = small.codes.reshape(len(self.states), len(other.states))
        return _Column(table[self.codes[:, None], other.codes], small.states)

    def map(self, change: Callable[[State], State]) -> _Column:
        small = _Column.of(map(change, self.states))
        return _Column(small.codes[self.codes], small.states)

    def transposed(self) -> _Column:
        return _Column(self.codes.T, self.states)

    def at(self, rows: NDArray[np.int64]) -> _Column:
        # States that no remaining row has are dropped: later tables grow with their number.
        used, codes = np.unique(self.codes.ravel()[rows], return_inverse=True)
        return _Column(codes, [self.states[code] for code in used])


@dataclass
class _Table:
    """Rows that a vertex, or several that were eliminated together, can be in.

    ``origin``: for each row the option of ``vertex``, or a row of each of the two ``parts``.
    """

    needs: dict[ValueName, _Column]
    makes: dict[ValueName, _Column]
    costs: NDArray[np.float64]
    origin: NDArray[np.int64]
    vertex: int = -1
    parts: tuple[_Table, ...] = ()

    def needed(self, value: ValueName) -> _Column:
        # State 0, the empty set of placements, for a value that this table does not read.
        nothing = _Column(np.zeros(len(self.costs), np.int64), [0])
        return self.needs.get(value, nothing)

    def at(self, rows: NDArray[np.int64]) -> _Table:
        return replace(
            self,
            needs={value: column.at(rows) for value, column in self.needs.items()},
            makes={value: column.at(rows) for value, column in self.makes.items()},
            costs=self.costs.ravel()[rows],
            origin=self.origin[rows],
        )


class Elimination:
    """Solves one problem; see the module's docstring.

    Args:
        vertices: every value is made by exactly one vertex, which does not read it itself. No cost
            is negative.
        conversion_cost: see :data:`sp_compiler.solve.placement_problem.ConversionCost`.
        max_rows: how many of the cheapest rows of a table are kept. The result is then a valid
            choice, but not always the best one.
        most_us: the known cost of some choice, in us.
    """

    def __init__(
        self,
        vertices: Sequence[Vertex],
        conversion_cost: ConversionCost,
        *,
        max_rows: int | None = None,
        most_us: float = math.inf,
    ) -> None:
        self._conversion_cost = conversion_cost
        self._max_rows = max_rows
        self._most_us = most_us * (1 + 1e-9)  # sums in another order differ by their rounding
        self._placements: list[Placement] = []
        self._numbers: dict[Placement, int] = {}
        self._costs: dict[tuple[ValueName, int, int], float] = {}
        self._tables = {i: self._leaf(i, vertex) for i, vertex in enumerate(vertices)}
        self._maker = {value: i for i, table in self._tables.items() for value in table.makes}
        self._readers: dict[ValueName, set[int]] = defaultdict(set)
        for i, table in self._tables.items():
            for value in table.needs:
                self._readers[value].add(i)
        # The weight of each pair that can be eliminated, and all weights that pairs have had.
        self._edges: dict[tuple[int, int], tuple[int, int]] = {}
        self._lightest: list[tuple[int, int, int, int]] = []
        for i in self._tables:
            self._measure(i)

    def run(self) -> list[int] | None:
        """Return the cheapest options, the first of equally cheap ones; ``None`` if a table gets
        too wide.

        Raises:
            NoChoiceError: no choice satisfies every need.
        """
        choices = [0] * len(self._tables)
        for table in self._tables.values():
            _require_rows(table)
        # Ties are broken by number, so that every rank eliminates in the same order.
        while self._edges:
            growth, pairs, first, second = heapq.heappop(self._lightest)
            if self._edges.get((first, second)) != (growth, pairs):  # eliminated, or reweighed
                continue
            if pairs > MAX_PAIRS:
                return None
            self._eliminate(first, second)
        # One table per connected component is left, and nothing outside sees it: its cheapest row
        # is the best. Trace that back to the options that it was made of.
        todo = [(table, int(table.costs.argmin())) for table in self._tables.values()]
        while todo:
            table, row = todo.pop()
            if table.parts:
                todo += zip(table.parts, table.origin[row].tolist(), strict=True)
            else:
                choices[table.vertex] = int(table.origin[row, 0])
        return choices

    @property
    def cost_us(self) -> float:
        """Cost of the cheapest rows: the objective after :meth:`run`, before that a lower bound."""
        return sum(float(table.costs.min()) for table in self._tables.values())

    def _leaf(self, number: int, vertex: Vertex) -> _Table:
        """Table of one vertex: a row per distinct outside view of its options."""
        needs = list(dict.fromkeys(vertex.needs))
        cheapest: dict[tuple[State, ...], tuple[float, int]] = {}
        for index, option in enumerate(vertex.options):
            masks = dict.fromkeys(needs, 0)
            # A set per value: ``x * x`` may need one value in two placements.
            for value, placement in zip(vertex.needs, option.needs, strict=True):
                masks[value] |= 1 << self._number(placement)
            row = (*masks.values(), *((self._number(placement), 0) for placement in option.makes))
            # The tiny slope prefers the first of several equal options, on every rank.
            cost = option.cost_us + 1e-6 * index
            if row not in cheapest or cost < cheapest[row][0]:
                cheapest[row] = (cost, index)
        values = [*needs, *vertex.makes]
        columns = [_Column.of(row[i] for row in cheapest) for i in range(len(values))]
        return _Table(
            dict(zip(needs, columns, strict=False)),
            dict(zip(vertex.makes, columns[len(needs) :], strict=True)),
            np.array([cost for cost, _ in cheapest.values()], np.float64),
            np.array([[index] for _, index in cheapest.values()], np.int64),
            number,
        )

    def _number(self, placement: Placement) -> int:
        if placement not in self._numbers:
            self._numbers[placement] = len(self._placements)
            self._placements.append(placement)
        return self._numbers[placement]

    def _cost(self, value: ValueName, made: int, mask: int) -> float:
        """us of converting ``value`` from one placement to all in ``mask``."""
        mask &= ~(1 << made)  # the placement it is made in is free
        if not mask:
            return 0.0
        key = (value, made, mask)
        if key not in self._costs:
            source = self._placements[made]
            costs = [self._conversion_cost(value, source, self._placements[t]) for t in _bits(mask)]
            # Infinite if there is no such conversion, so that rows that need it are dropped.
            self._costs[key] = sum(math.inf if cost is None else cost for cost in costs)
        return self._costs[key]

    # The order of elimination: next is the pair after which the fewest values are seen from
    # outside, because the number of rows of a table grows exponentially with those values.

    def _measure(self, number: int) -> None:
        """Weigh the elimination of a table with each that it reads from and each that reads it.

        The weight: by how many values it widens the wider table, then how many pairs it examines.
        """
        for pair in self._edges_of(number):
            if pair in self._edges:
                continue
            a, b = (self._tables[end] for end in pair)
            needs, makes = self._interface(*pair)
            growth = len(needs) + len(makes) - max(len(t.needs) + len(t.makes) for t in (a, b))
            weight = self._edges[pair] = growth, len(a.costs) * len(b.costs)
            heapq.heappush(self._lightest, (*weight, *pair))

    def _edges_of(self, number: int) -> list[tuple[int, int]]:
        """Return a table with each that it reads from, and with each that reads it."""
        table = self._tables[number]
        pairs = [(self._maker[value], number) for value in table.needs]
        return pairs + [
            (number, reader) for value in table.makes for reader in self._readers[value]
        ]

    def _interface(self, first: int, second: int) -> tuple[list[ValueName], list[ValueName]]:
        """Values that the two tables together need, and those they make that others read."""
        a, b, both = self._tables[first], self._tables[second], {first, second}
        made = a.makes | b.makes
        needs = [value for value in a.needs | b.needs if value not in made]
        return needs, [value for value in made if self._readers[value] - both]

    # One elimination.

    def _eliminate(self, first: int, second: int) -> None:
        """Replace two tables by one, with the number of the first."""
        needs, makes = self._interface(first, second)
        for pair in (*self._edges_of(first), *self._edges_of(second)):
            self._edges.pop(pair, None)
        a, b = self._tables.pop(first), self._tables.pop(second)
        # Unregistered before the pairs are made, which depend on what the *remaining* tables read.
        for value in (*a.makes, *b.makes):
            self._maker.pop(value, None)
        for value in (*a.needs, *b.needs):
            self._readers[value] -= {first, second}
        table = self._pairs(a, b, needs, makes)
        _require_rows(table)
        self._tables[first] = self._within_limits(self._without_replaceable(table))
        self._maker.update(dict.fromkeys(makes, first))
        for value in needs:
            self._readers[value].add(first)
        self._measure(first)

    def _mask_needed(self, value: ValueName) -> int:
        """Placements in which the remaining tables may read ``value``."""
        mask = 0
        for reader in self._readers[value]:
            for needed in self._tables[reader].needs[value].states:
                mask |= needed
        return mask

    def _pairs(
        self, a: _Table, b: _Table, needs: Sequence[ValueName], makes: Sequence[ValueName]
    ) -> _Table:
        """Table with the cheapest pair of rows for each joint state, the cheapest row first."""
        costs = np.add.outer(a.costs, b.costs)
        needed = {
            value: a.needed(value).with_each(b.needed(value), operator.or_) for value in needs
        }
        made = {}
        # In both directions: after some eliminations each may read a value of the other.
        for maker, reader in ((a, b), (b, a)):
            for value, column in maker.makes.items():
                joint = column.with_each(reader.needed(value), lambda state, mask: (*state, mask))
                joint = joint if maker is a else joint.transposed()
                # Paid once: what the maker's side has already converted is free for the reader.
                paid = [self._cost(value, at, mask & ~have) for at, have, mask in joint.states]
                costs += np.array(paid)[joint.codes]
                if value in makes:
                    made[value] = joint.map(_visible(self._mask_needed(value)))
        # Stable, so that of equal pairs every rank keeps the same one. Impossible pairs have
        # infinite cost, which sorts last.
        cheapest_first = costs.argsort(axis=None, kind="stable")
        possible = cheapest_first[: np.isfinite(costs).sum()]
        rows = possible[_first_of_each([*needed.values(), *made.values()], possible)]
        first, second = np.divmod(rows, len(b.costs))
        return _Table(
            {value: column.at(rows) for value, column in needed.items()},
            {value: made[value].at(rows) for value in makes},
            costs.ravel()[rows],
            np.stack([first, second], axis=1),
            parts=(a, b),
        )

    def _without_replaceable(self, table: _Table) -> _Table:
        """Drop rows that a cheaper one can replace, whatever the rest of the problem does.

        Args:
            table: the cheapest row first.
        """
        makers = {v: self._tables[self._maker[v]].makes[v].states for v in table.needs}
        seen = {value: self._mask_needed(value) for value in table.makes}

        # Cheap rows are in few distinct states.
        @cache
        def need_us(value: ValueName, missing: int) -> float:
            return max(self._cost(value, placement, missing) for placement, _ in makers[value])

        @cache
        def made_us(value: ValueName, old: State, new: State) -> float:
            return self._extra_us(value, old, new, seen[value])

        kept: list[int] = []
        rows = np.arange(len(table.costs))
        # Comparing all pairs would cost more time than it saves: a few cheap rows replace most.
        while len(rows) and len(kept) < _CHEAPEST:
            cheap, rows = int(rows[0]), rows[1:]
            kept.append(cheap)
            # Conversions outside may cost this much more with the cheap row, at most: a row whose
            # additional cost is smaller may still be part of the best choice.
            surplus_us = table.costs[rows] - table.costs[cheap]
            for value, column in table.needs.items():
                new = column.states[column.codes[cheap]]
                extra_us = [need_us(value, new & ~old) for old in column.states]
                surplus_us -= np.array(extra_us)[column.codes[rows]]
            for value, column in table.makes.items():
                new = column.states[column.codes[cheap]]
                extra_us = [made_us(value, old, new) for old in column.states]
                surplus_us -= np.array(extra_us)[column.codes[rows]]
            rows = rows[surplus_us < 0]
        return table.at(np.array([*kept, *rows], np.int64))

    def _within_limits(self, table: _Table) -> _Table:
        """Drop rows beyond the limits; ``table``: the cheapest row first."""
        if self._max_rows is not None:
            return table.at(np.arange(len(table.costs))[: self._max_rows])
        if self._most_us < math.inf:
            # Conversions between the remaining tables only add to this.
            return table.at(np.flatnonzero(table.costs + self.cost_us <= self._most_us))
        return table

    def _extra_us(self, value: ValueName, old: State, new: State, seen: int) -> float:
        """Return the largest extra cost, in us, of conversions of ``value`` if it is made as
        ``new``."""
        extra_us = 0.0
        for target in _bits(seen & ~new[1]) if old != new else ():
            bit = 1 << target
            before_us = 0.0 if old[1] & bit else self._cost(value, old[0], bit)
            # If the old state cannot reach the target, nobody outside can ask for it.
            if before_us < math.inf:
                extra_us += max(0.0, self._cost(value, new[0], bit) - before_us)
        return extra_us


def _require_rows(table: _Table) -> None:
    # Checked at once: without rows, the maximum of its conversion costs would not exist.
    if not len(table.costs):
        raise NoChoiceError("no choice satisfies every need")


def _visible(seen: int) -> Callable[[State], State]:
    """Make a function that reduces a joint state to the conversions that others may read."""
    # Other conversions are dropped, so that rows that differ only in them become one.
    return lambda state: (state[0], (state[1] | state[2]) & seen & ~(1 << state[0]))


def _first_of_each(columns: Sequence[_Column], pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions in ``pairs`` of the first pair of each joint state, in their order."""
    # A joint state as one number, column by column, as digits of a number in a mixed base.
    keys, size = np.zeros(len(pairs), np.int64), 1
    for column in columns:
        # There are at most as many distinct keys as pairs: renumbering makes room for more columns.
        if size * len(column.states) > _MAX_KEY:
            keys = np.unique(keys, return_inverse=True)[1]
            size = len(pairs)
        keys = keys * len(column.states) + column.codes.ravel()[pairs]
        size *= len(column.states)
    return np.sort(np.unique(keys, return_index=True)[1])


def _bits(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]
