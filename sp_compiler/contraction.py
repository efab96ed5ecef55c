"""Exact solution of a placement problem by contraction: no search, where few values live at once.

Two vertices of which one reads what the other makes become one table of all pairs of their rows. A
row is what the rest of the problem can see: which placements it needs of values from outside, and
in which placements the values that are read outside exist. Of rows that look alike, and of those
that another row can stand in for at no higher cost, one is kept. A layer of a transformer hands on
one or two values, so tables stay small and the last one has a single row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sp_compiler.placement import Placement
from sp_compiler.vertices import ConversionCost, Value, Vertex

Row = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""Set of needed placements of each needed value; made placement and set of those converted to
already of each made value. Sets are bit masks over the numbered placements."""

MAX_PAIRS = 400_000
"""Pairs of rows that one contraction may look at, about a second."""
_CHEAPEST = 24
"""How many cheap rows are tried as a stand-in for each dearer one."""


@dataclass
class _Table:
    """``origin``: for each row the option of ``vertex``, or a row of each of the two ``parts``."""

    needs: tuple[Value, ...]
    makes: tuple[Value, ...]
    rows: dict[Row, float]
    origin: list[tuple[int, ...]]
    vertex: int = -1
    parts: tuple[_Table, ...] = ()


class Contraction:
    """Contracts one problem; see the module's docstring.

    Args:
        vertices: every value is made by exactly one vertex, which does not read it.
        conversion_cost: see :data:`sp_compiler.vertices.ConversionCost`.
    """

    def __init__(self, vertices: Sequence[Vertex], conversion_cost: ConversionCost) -> None:
        self._vertices = vertices
        self._conversion_cost = conversion_cost
        self._placements: list[Placement] = []
        self._numbers: dict[Placement, int] = {}
        self._costs: dict[tuple[Value, int, int], float] = {}
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}
        self._tables = {i: self._leaf(i, vertex) for i, vertex in enumerate(vertices)}
        self._maker = {value: i for i, table in self._tables.items() for value in table.makes}
        self._readers: dict[Value, set[int]] = defaultdict(set)
        for i, table in self._tables.items():
            for value in table.needs:
                self._readers[value].add(i)

    def run(self) -> list[int] | None:
        """The cheapest choice of options, the first ones where several are; ``None``: too wide.

        Raises:
            ValueError: no choice satisfies every need.
        """
        while edges := self._edges():
            _, pairs, first, second = min(edges)
            if pairs > MAX_PAIRS:
                return None
            self._contract(first, second)
        choices = [0] * len(self._vertices)
        todo = []
        for table in self._tables.values():
            if not table.rows:
                raise ValueError("no choice satisfies every need")
            costs = list(table.rows.values())
            todo.append((table, costs.index(min(costs))))
        while todo:
            table, row = todo.pop()
            if table.parts:
                todo += zip(table.parts, table.origin[row], strict=True)
            else:
                (choices[table.vertex],) = table.origin[row]
        return choices

    def _leaf(self, number: int, vertex: Vertex) -> _Table:
        needs = tuple(dict.fromkeys(vertex.needs))
        found: dict[Row, tuple[float, int]] = {}
        for index, option in enumerate(vertex.options):
            masks = dict.fromkeys(needs, 0)
            for value, placement in zip(vertex.needs, option.needs, strict=True):
                masks[value] |= 1 << self._number(placement)
            row = (tuple(masks.values()), tuple((self._number(p), 0) for p in option.makes))
            # The tiny slope prefers the first of several equal options, on every rank.
            cost = option.cost_us + 1e-6 * index
            if row not in found or cost < found[row][0]:
                found[row] = (cost, index)
        rows = {row: cost for row, (cost, _) in found.items()}
        return _Table(needs, vertex.makes, rows, [(i,) for _, i in found.values()], number)

    def _number(self, placement: Placement) -> int:
        if placement not in self._numbers:
            self._numbers[placement] = len(self._placements)
            self._placements.append(placement)
        return self._numbers[placement]

    def _cost(self, value: Value, made: int, mask: int) -> float:
        """us of converting ``value`` from one placement to all in ``mask``."""
        mask &= ~(1 << made)
        if not mask:
            return 0.0
        key = (value, made, mask)
        if key not in self._costs:
            source = self._placements[made]
            costs = [self._conversion_cost(value, source, self._placements[t]) for t in _bits(mask)]
            self._costs[key] = sum(math.inf if cost is None else cost for cost in costs)
        return self._costs[key]

    # Which pair next: the one after which the fewest values are seen from outside.

    def _edges(self) -> list[tuple[int, int, int, int]]:
        pairs = {
            (maker, reader): None
            for value, maker in self._maker.items()
            for reader in sorted(self._readers[value])
        }
        return [(*self._size(*pair), *pair) for pair in pairs]

    def _size(self, first: int, second: int) -> tuple[int, int]:
        """By how much a contraction widens the wider table, and how many pairs it looks at."""
        if (first, second) not in self._sizes:
            a, b = self._tables[first], self._tables[second]
            needs, makes = self._interface(first, second)
            growth = len(needs) + len(makes) - max(len(t.needs) + len(t.makes) for t in (a, b))
            self._sizes[first, second] = growth, len(a.rows) * len(b.rows)
        return self._sizes[first, second]

    def _interface(self, first: int, second: int) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """Values that the two together need, and those made by them that others read."""
        a, b, both = self._tables[first], self._tables[second], {first, second}
        made = (*a.makes, *b.makes)
        needs = tuple(value for value in dict.fromkeys((*a.needs, *b.needs)) if value not in made)
        return needs, tuple(value for value in made if self._readers[value] - both)

    # One contraction.

    def _contract(self, first: int, second: int) -> None:
        needs, makes = self._interface(first, second)
        a, b = self._tables.pop(first), self._tables.pop(second)
        for value in (*a.makes, *b.makes):
            self._maker.pop(value, None)
        for value in (*a.needs, *b.needs):
            self._readers[value] -= {first, second}
        seen = [self._mask_needed(value) for value in makes]
        best = self._pairs(a, b, needs, makes, seen)
        kept = self._without_replaceable(best, needs, makes, seen)
        rows = {row: best[row][0] for row in kept}
        table = _Table(needs, makes, rows, [best[row][1:] for row in kept], parts=(a, b))
        self._tables[first] = table
        self._sizes = {
            pair: size for pair, size in self._sizes.items() if not {first, second} & {*pair}
        }
        self._maker.update(dict.fromkeys(makes, first))
        for value in needs:
            self._readers[value].add(first)

    def _mask_needed(self, value: Value) -> int:
        """Placements in which the remaining tables may read ``value``."""
        mask = 0
        for reader in self._readers[value]:
            table = self._tables[reader]
            position = table.needs.index(value)
            for needed, _ in table.rows:
                mask |= needed[position]
        return mask

    def _pairs(
        self,
        a: _Table,
        b: _Table,
        needs: Sequence[Value],
        makes: Sequence[Value],
        seen: Sequence[int],
    ) -> dict[Row, tuple[float, int, int]]:
        """The cheapest pair of rows behind each row of the new table."""
        best: dict[Row, tuple[float, int, int]] = {}
        for i, (first, first_us) in enumerate(a.rows.items()):
            needed_by_a = dict(zip(a.needs, first[0], strict=True))
            made_by_a = dict(zip(a.makes, first[1], strict=True))
            for j, (second, second_us) in enumerate(b.rows.items()):
                needed = needed_by_a, dict(zip(b.needs, second[0], strict=True))
                made = made_by_a | dict(zip(b.makes, second[1], strict=True))
                cost = first_us + second_us
                for mine in needed:
                    for value, mask in mine.items():
                        if value in made:
                            placement, have = made[value]
                            cost += self._cost(value, placement, mask & ~have)
                            made[value] = placement, have | mask
                if cost == math.inf:
                    continue
                row = (
                    tuple(needed[0].get(value, 0) | needed[1].get(value, 0) for value in needs),
                    tuple(
                        _visible(made[value], mask) for value, mask in zip(makes, seen, strict=True)
                    ),
                )
                if row not in best or cost < best[row][0]:
                    best[row] = (cost, i, j)
        return best

    def _without_replaceable(
        self,
        best: dict[Row, tuple[float, int, int]],
        needs: Sequence[Value],
        makes: Sequence[Value],
        seen: Sequence[int],
    ) -> list[Row]:
        """Rows for which no cheaper one can stand in whatever the rest of the problem does."""
        makers = {value: self._placements_made(value) for value in needs}
        kept: list[Row] = []

        def replaceable(row: Row, other: Row) -> bool:
            """Whether conversions outside cost at most the difference more with ``other``."""
            left = best[row][0] - best[other][0]
            for value, mask, others in zip(needs, row[0], other[0], strict=True):
                if others & ~mask:
                    left -= max(self._cost(value, p, others & ~mask) for p in makers[value])
                    if left < 0:
                        return False
            for value, mine, its, mask in zip(makes, row[1], other[1], seen, strict=True):
                for target in _bits(mask & ~its[1]) if mine != its else ():
                    bit = 1 << target
                    before = 0.0 if mine[1] & bit else self._cost(value, mine[0], bit)
                    if before < math.inf:
                        left -= max(0.0, self._cost(value, its[0], bit) - before)
            return left >= 0

        for row in sorted(best, key=best.__getitem__):
            if not any(replaceable(row, other) for other in kept[:_CHEAPEST]):
                kept.append(row)
        return kept

    def _placements_made(self, value: Value) -> set[int]:
        """Placements in which the remaining tables may make ``value``."""
        table = self._tables[self._maker[value]]
        position = table.makes.index(value)
        return {makes[position][0] for _, makes in table.rows}


def _visible(made: tuple[int, int], seen: int) -> tuple[int, int]:
    """A value's placement, and of those it was converted to the ones that others may read."""
    placement, have = made
    return placement, have & seen & ~(1 << placement)


def _bits(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]
