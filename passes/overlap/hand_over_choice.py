"""Choose the gradients that a backward defers to the call before: those that hide most
communication.

A set of them is first scheduled as tasks, without graphs; only the chosen set needs graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.step_memory import Room
from sp_compiler.ir.forward_backward import Partitioned, SplitBackward
from sp_compiler.passes.overlap.compare import (
    PARTS_BEYOND,
    ROUNDING,
    WORTH_MORE_FUNCTIONS,
    WORTH_MORE_MEMORY,
    quickest_of,
)
from sp_compiler.passes.overlap.hand_over import HandOver, hand_over_of, movable_gradients
from sp_compiler.passes.overlap.orders import Schedule, Unordered
from sp_compiler.solve.block_schedule import simulate
from sp_compiler.solve.list_schedule import ListSchedule


@dataclass(frozen=True, eq=False)
class _Way:
    """A way to defer gradients, whose graphs are made on demand.

    Attributes:
        alone: the backward that defers none.
        search: for orders of the function of two calls.
    """

    hand_over: HandOver
    alone: Unordered
    search: ListSchedule

    @cached_property
    def split(self) -> SplitBackward:
        return self.hand_over.split()

    def time_us(self, room_bytes: int) -> float:
        """Return the time of :meth:`scheduled`, without the graphs."""
        return simulate(self.search.block, self.search.order(room_bytes)).time_us

    def scheduled(self, room_bytes: int, *, thorough: bool = False) -> Schedule:
        """Return a good order of the function of two calls."""
        return self._both.scheduled(room_bytes, thorough=thorough)

    @cached_property
    def _both(self) -> Unordered:
        assert self.split.both is not None
        both = self.alone.with_graph(self.split.both)
        # In one function, other operators may be fused than in the two that it replaces.
        is_same = both.tasks.block == self.search.block
        return replace(both, known_search=self.search) if is_same else both


def hand_over(
    parts: Partitioned,
    alone: Unordered,
    best_so_far: Schedule,
    room: Room,
) -> SplitBackward | None:
    """Return the backward that defers gradients, scheduled; ``None`` if that is
    not much better than ``best_so_far``.

    Args:
        alone: the backward that defers none.
    """
    worth_us = (1 - WORTH_MORE_FUNCTIONS) * best_so_far.time_us
    if worth_us < best_so_far.compute_us:
        return None
    most_bytes = max(room.backward_bytes, room.behind_bytes)

    # Growing from either end visits some sets twice.
    @cache
    def way_of(late: frozenset[int]) -> _Way | None:
        moved = hand_over_of(parts, late)
        if moved is None:
            return None
        search = alone.search_of_calls(moved.calls())
        fits = search.block.given_bytes <= most_bytes
        return _Way(moved, alone, search) if fits else None

    indices = movable_gradients(parts, alone.own_parameters)
    singles = [way for index in indices if (way := way_of(frozenset({index})))]
    singles = [way for way in singles if way.search.least_us < worth_us]
    if not singles:
        return None
    ways = _grown_ways(singles, most_bytes, best_so_far.compute_us, way_of)
    best, ordered = _fastest(ways, most_bytes)
    if ordered.time_us > worth_us:
        quickest = quickest_of([way.search for way in singles], most_bytes)
        best, ordered = _fastest([way for way in singles if way.search is quickest], most_bytes)
    if ordered.time_us > worth_us:
        # Short searches may miss what the bounds promise: a longer one, of the best promise alone.
        best = min(singles, key=_promise)
        ordered = best.scheduled(most_bytes, thorough=True)
    if ordered.time_us > worth_us:
        return None
    least_bytes = limit_bytes = max(best.search.block.given_bytes, room.backward_bytes)
    if ordered.peak_bytes > least_bytes:
        ordered = _in_least_room(best, ordered, room)
        limit_bytes = ordered.room_bytes
    # A search with more memory than its order finally uses may still find a faster one.
    longer = best.scheduled(limit_bytes, thorough=True)
    ordered = min(longer, ordered, key=lambda schedule: schedule.time_us)
    room_bytes = max(least_bytes, ordered.peak_bytes)
    weights = alone.with_graph(best.split.weights)
    if weights.given_bytes > room_bytes:
        return None
    report_of(Pass.OVERLAP).rewrote(kind="hand_over")
    inputs = ordered.of_last_calls(best.split.inputs)
    return SplitBackward(inputs, weights.scheduled(room_bytes).graph(), ordered.graph())


def _promise(way: _Way) -> tuple[float, int]:
    """Key to sort ways by: the lowest time that a search could find, then the bytes."""
    return way.search.least_us, way.search.block.given_bytes


def _fastest(ways: Sequence[_Way], room_bytes: int) -> tuple[_Way, Schedule]:
    """Return the way that takes the least time, scheduled."""
    best = min(ways, key=lambda way: way.time_us(room_bytes))
    return best, best.scheduled(room_bytes)


def _grown_ways(
    singles: Sequence[_Way],
    most_bytes: int,
    compute_us: float,
    way_of: Callable[[frozenset[int]], _Way | None],
) -> list[_Way]:
    """Return ways to defer several gradients that may be the best.

    Args:
        singles: ways to defer one.
        compute_us: time of all kernels.
        way_of: the way to defer a set of gradients, if there is one.
    """
    promising = sorted(singles, key=_promise)
    first = _grown(promising, most_bytes, way_of)
    if first.search.quick_us(most_bytes) <= (1 + WORTH_MORE_MEMORY) * compute_us:
        return [first]
    other = _grown(singles[::-1], most_bytes, way_of)
    # A full search may reach the lower bound even if the quick walk does not.
    return [min(first, other, key=lambda way: way.search.quick_us(most_bytes)), promising[0]]


def _grown(
    singles: Sequence[_Way],
    most_bytes: int,
    way_of: Callable[[frozenset[int]], _Way | None],
) -> _Way:
    """Return the first of ``singles`` extended by each of the others that makes it faster."""
    # Greedily: n gradients have 2^n sets. An exhaustive search found no set that hides 6 % more of
    # the communication of the models in docs/overlap.md.
    best = singles[0]
    for single in singles[1:]:
        best_us = best.search.quick_us(most_bytes)
        if best_us <= (1 + ROUNDING) * best.search.block.compute_us:
            break
        more = way_of(best.hand_over.late | single.hand_over.late)
        if more is None or more.search.least_us >= best_us:  # no walk can be faster
            continue
        if more.search.quick_us(most_bytes) < (1 - ROUNDING) * best_us:
            best = more
    return best


def _in_least_room(way: _Way, ordered: Schedule, room: Room) -> Schedule:
    """Return a schedule of ``way`` about as fast as ``ordered``, which may use all of ``room``, in
    as few parts of it as possible."""
    enough_us = (1 + WORTH_MORE_MEMORY) * ordered.time_us
    beyond_bytes = room.behind_bytes - room.backward_bytes
    schedules = {PARTS_BEYOND: ordered}

    # Full searches: the result of a quick walk in less memory says little about theirs.
    def is_enough(part: int) -> bool:
        limit_bytes = room.backward_bytes + beyond_bytes * part // PARTS_BEYOND
        schedules[part] = way.scheduled(limit_bytes)
        return schedules[part].time_us <= enough_us

    least = bisect_left(range(PARTS_BEYOND), True, key=is_enough)
    return schedules[least]
