"""List schedule of a block: an order in which kernels overlap with collectives.

In its original order, a block alternates between the two. The schedule walks along that order with
a clock. The next kernel is the first whose operands are ready. Kernels that a collective depends on
(the critical path and its recomputation) go first; others, mostly weight gradients, fill the time
in which those wait. This is the policy HEU of Lynx for one block (Chen et al. 2024, arXiv
2406.08756): it is found once for all equal blocks. If a walk leaves the compute stream idle,
further walks with other priorities follow, and in an order that will run, single tasks are moved
(:mod:`sp_compiler.solve.order_search`): some orders are no walk's, whatever its priorities.

Memory: at each step, the rest of the block can still run below the limit in an order that is known
to fit (the original one, later the best so far), so that every walk completes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise, product

from sp_compiler.solve.block_schedule import Block, peak_bytes, simulate
from sp_compiler.solve.order_search import improved
from sp_compiler.solve.schedule_bound import least_us
from sp_compiler.solve.schedule_walk import Fitting, Priorities, Walked, as_given, walked

# Number of walks that each improve on the one before by using its times; two or three suffice. If
# the first costs more than the best so far by this factor, those after it will not catch up.
_TIMED_WALKS, _FAR = 4, 1.1
# Kernels that take a tenth of the collectives' time hide next to nothing, in whatever order.
_WORTH_HIDING = 0.1
# Tasks in all walks with changed ranks together: at most about 0.1 s for a block. The time of a
# walk is more than linear in them, so a model that is one long region gets only the timed walks.
_TASKS_WALKED, _PATIENCE, _MOST_TASKS = 20_000, 50, 400
# More effort for the one order that will run than for each of the many it was compared with, and
# tasks in all orders in which single tasks were moved: at most about 0.3 s for a block. A smaller
# share of the time than the last is not worth that.
_THOROUGH, _TASKS_MOVED, _WORTH_MOVING = 4, 1_600_000, 0.001
_ROUNDING = 1e-6  # of sums of the same times in another order


def list_schedule(block: Block, limit_bytes: int) -> list[int]:
    """Return an order of the tasks of ``block`` with low time, as positions.

    The result is the same for the same block, on every rank.

    Args:
        limit_bytes: limit for :func:`peak_bytes`; if the original order needs more, its peak is the
            limit.
    """
    return ListSchedule(block).order(limit_bytes)


class ListSchedule:
    """Orders of one block below any number of limits, as :func:`list_schedule` returns.

    Attributes:
        block: its tasks.
        least_us: a time below which there is no order.
    """

    def __init__(self, block: Block) -> None:
        self.least_us = least_us(block)
        self.block, self._walked = block, _with_room_to_arrive(block)
        self._first: dict[int, Walked] = {}  # the best of the first walks, by the limit
        self._compared: dict[int, Walked] = {}  # of searches that are not thorough
        self._orders: dict[tuple[int, bool], list[int]] = {}  # by the limit and thoroughness

    def quick_us(self, limit_bytes: int) -> float:
        """Return the approximate time of :meth:`order`, to compare blocks: that of the first walks,
        whose priorities are known beforehand."""
        return self._best_of_first(max(limit_bytes, self.block.given_bytes)).time_us

    def order(self, limit_bytes: int, *, thorough: bool = False) -> list[int]:
        """Return the order of :func:`list_schedule`; ``thorough``: the result of a longer search,
        which is no slower and keeps to the limit, or to that order's peak if it is larger."""
        key = limit_bytes if thorough else max(limit_bytes, self.block.given_bytes), thorough
        if key not in self._orders:
            find = self._thorough_order if thorough else self._compared_order
            self._orders[key] = find(key[0])
        return self._orders[key]

    def _compared_order(self, limit_bytes: int) -> list[int]:
        return self._tidied(self._best_compared(limit_bytes).order, limit_bytes)

    def _thorough_order(self, limit_bytes: int) -> list[int]:
        block, compared = self.block, self.order(limit_bytes)
        if not self._is_worth_searching:
            return compared
        best = self._best_compared(max(limit_bytes, block.given_bytes))
        # Budgets rely on the peak of this order, which may be below that of the given one.
        limit_bytes = max(limit_bytes, peak_bytes(block, compared))
        searched_bytes = max(limit_bytes, peak_bytes(self._walked, best.order))
        longer = self._improved(best, searched_bytes, _THOROUGH)

        def fits(order: Sequence[int]) -> bool:
            return peak_bytes(block, order) <= limit_bytes

        # Of two walks that cost the same, later waits can make the first one faster.
        walks = [compared, self._tidied(longer.order, limit_bytes)]
        walk = min(filter(fits, walks), key=self._time_us)
        known = [walk, *filter(fits, [range(len(block.tasks))])]
        enough_us = (1 + _WORTH_MOVING) * self.least_us
        moved = improved(block, limit_bytes, known, enough_us, _TASKS_MOVED)
        # It may take more memory than the walk, up to the limit, or more time on a fast link.
        is_worth = self._time_us(moved) < (1 - _WORTH_MOVING) * self._time_us(walk)
        return self._tidied(moved, limit_bytes) if is_worth else walk

    @property
    def _is_worth_searching(self) -> bool:
        block = self.block
        hides = block.compute_us > _WORTH_HIDING * block.link_us
        return hides and len(block.tasks) <= _MOST_TASKS

    @property
    def _enough_us(self) -> float:
        return self.least_us * (1 + _ROUNDING)

    def _time_us(self, order: Sequence[int]) -> float:
        return simulate(self.block, order).time_us

    def _tidied(self, order: list[int], limit_bytes: int) -> list[int]:
        return _tidy(self.block, _late_waits(self.block, order, limit_bytes), limit_bytes)

    def _best_compared(self, limit_bytes: int) -> Walked:
        if limit_bytes not in self._compared:
            first = self._best_of_first(limit_bytes)
            self._compared[limit_bytes] = self._improved(first, limit_bytes, 1)
        return self._compared[limit_bytes]

    def _improved(self, best: Walked, limit_bytes: int, effort: int) -> Walked:
        if not self._is_worth_searching:
            return best
        best = _climb(self._walked, limit_bytes, best, self._enough_us, effort)
        return _swap(self._walked, limit_bytes, best, self._enough_us)

    def _best_of_first(self, limit_bytes: int) -> Walked:
        for from_bytes, best in self._first.items():
            if from_bytes == limit_bytes or (from_bytes < limit_bytes and not best.fitting.limits):
                return best
        best = _best_of_first(self._walked, limit_bytes, self._enough_us)
        self._first[limit_bytes] = best
        return best


def _with_room_to_arrive(block: Block) -> Block:
    """Return ``block`` with what a wait allocates, such as a copy in another layout, held from the
    start on: waits then only free memory, whenever a walk runs them."""
    tasks, storage_bytes = list(block.tasks), list(block.storage_bytes)
    for start, wait in block.wait_of.items():
        arrival_bytes = block.run_bytes[wait]
        if not arrival_bytes:
            continue
        held = len(storage_bytes)
        storage_bytes.append(arrival_bytes)
        run_bytes = max(tasks[start].run_bytes, block.made_bytes[start] + arrival_bytes)
        makes, reads = (*tasks[start].makes, held), (*tasks[wait].reads, held)
        tasks[start] = replace(tasks[start], makes=makes, run_bytes=run_bytes)
        tasks[wait] = replace(tasks[wait], reads=reads, run_bytes=0)
    return replace(block, tasks=tuple(tasks), storage_bytes=tuple(storage_bytes))


def _best_of_first(block: Block, limit_bytes: int, bound_us: float) -> Walked:
    """Return the best of the walks whose priorities are known beforehand."""
    best = as_given(block)
    fitting = best.fitting

    def walk_with(priorities: Priorities) -> None:
        nonlocal best
        # The first walk starts collectives as soon as their operands are ready; each later one
        # starts them as late as the times of the previous walk allow, while that improves.
        most_us = _FAR * best.cost_us
        for _ in range(_TIMED_WALKS):
            walk = walked(block, limit_bytes, priorities, fitting, most_us)
            if walk is None or walk.cost_us >= most_us:
                break
            best, most_us = min(best, walk, key=lambda walk: walk.cost_us), walk.cost_us
            priorities = replace(priorities, latest_us=_latest_starts(block, walk.start_us))

    other_if_sparing = []
    for ranks in (_in_given_order(block), _by_longest_path(block), _by_next_collective(block)):
        fitting.spends = False
        walk_with(Priorities(ranks))
        if fitting.spends:
            other_if_sparing.append(ranks)
    for ranks in other_if_sparing:
        if best.time_us > bound_us:
            walk_with(Priorities(ranks, sparing=True))
    return best


def _in_given_order(block: Block) -> tuple[float, ...]:
    """Ranks that put the kernels that a collective needs first and waits last, so that the compute
    stream does not idle."""
    num_tasks = len(block.tasks)
    return tuple(
        math.inf if i in block.starts_of else i if block.leads_to_link[i] else i + num_tasks
        for i in range(num_tasks)
    )


def _by_longest_path(block: Block) -> tuple[float, ...]:
    """Priorities by the time of the longest path that follows a task."""
    return tuple(
        math.inf if i in block.starts_of else -to_end_us
        for i, to_end_us in enumerate(block.to_end_us)
    )


def _by_next_collective(block: Block) -> tuple[float, ...]:
    """Priorities by the kernel time between a task and the next collective.

    Of two equal chains, such as the halves of a batch, one gets ahead: it communicates while the
    other computes.
    """
    to_start_us = [math.inf] * len(block.tasks)
    for position in reversed(range(len(block.tasks))):
        task = block.tasks[position]
        ways_us = (
            0.0 if block.communicates(user) else to_start_us[user] for user in block.users[position]
        )
        to_start_us[position] = task.time_us + min(ways_us, default=math.inf)
    return tuple(math.inf if i in block.starts_of else us for i, us in enumerate(to_start_us))


def _swap(block: Block, limit_bytes: int, best: Walked, bound_us: float) -> Walked:
    """Repeat the walk with one collective held back until the next on the link could start, as long
    as that finds better orders; stops at ``bound_us``, below which there are none.

    A walk starts what is ready. Of two chains, such as the halves of a batch, the one that is ahead
    may need the link a moment later, and all its kernels follow that collective.
    """
    given_ranks = _in_given_order(block)
    tried: Walked | None = None
    while best is not tried and best.time_us > bound_us:
        tried, fitting = best, Fitting(block, best.order)
        on_link = [position for position in best.order if block.communicates(position)]
        for (first, second), ranks in product(
            pairwise(on_link), (tried.priorities.ranks, given_ranks)
        ):
            needs = block.tasks[second].needs
            ready_us = max((tried.start_us[i] + block.times_us[i] for i in needs), default=0.0)
            latest_us = {**tried.priorities.latest_us, first: ready_us + _ROUNDING, second: 0.0}
            priorities = replace(tried.priorities, ranks=ranks, latest_us=latest_us)
            walk = walked(block, limit_bytes, priorities, fitting, best.cost_us)
            if walk is not None and walk.cost_us < best.cost_us * (1 - _ROUNDING):
                best = walk
    return best


def _climb(block: Block, limit_bytes: int, best: Walked, bound_us: float, effort: int) -> Walked:
    """Repeat the walk with a few changed priorities and latest starts, as long as that finds better
    orders; stops at ``bound_us``, below which there are none. ``effort`` multiplies the time spent,
    1 for an order that is only compared with others.

    Orders are not changed directly, because few changes would respect the limit on memory.
    """
    # Seeded, because every rank has to find the same order; random() is the one method that gives
    # the same numbers in all versions of Python.
    draw = random.Random(0).random
    tasks, starts = len(block.tasks), list(block.wait_of)
    fitting, failures = Fitting(block, best.order), 0
    for _ in range(effort * _TASKS_WALKED // max(1, tasks)):
        if best.time_us <= bound_us or failures >= effort * _PATIENCE:
            break
        ranks, latest_us = list(best.priorities.ranks), dict(best.priorities.latest_us)
        for _ in range(1 + int(draw() * 4)):
            ranks[int(draw() * tasks)] = ranks[int(draw() * tasks)] + draw() - 0.5
        if starts and draw() < 0.5:
            start = starts[int(draw() * len(starts))]
            latest_us[start] = draw() * best.time_us if draw() < 0.5 else 0.0
        changed = replace(best.priorities, ranks=tuple(ranks), latest_us=latest_us)
        walk = walked(block, limit_bytes, changed, fitting, best.cost_us)
        failures += 1
        if walk is None or walk.cost_us > best.cost_us:
            continue
        if walk.cost_us < best.cost_us:
            fitting, failures = Fitting(block, walk.order), 0
        best = walk  # also if only as good: other changes lead on from there
    return best


def _latest_starts(block: Block, start_us: Sequence[float]) -> dict[int, float]:
    """Latest time to start each collective, by its start, so that nothing waits for it.

    A collective that is needed late, such as the gather of a saved shard, would otherwise delay one
    that the critical path waits for.

    Args:
        start_us: when each task begins in some order.
    """
    needed_us = {
        start: min((start_us[user] for user in block.users[wait]), default=math.inf)
        for start, wait in block.wait_of.items()
    }
    latest_us: dict[int, float] = {}
    link_us = math.inf
    # From the last one needed: each has to free the link for the next in time.
    for start in sorted(needed_us, key=lambda start: (needed_us[start], start), reverse=True):
        link_us = min(link_us, needed_us[start]) - block.tasks[start].link_us
        latest_us[start] = link_us
    return latest_us


def _late_waits(block: Block, order: list[int], limit_bytes: int) -> list[int]:
    """Move each wait to the first task that needs it, if memory allows its operand to live that
    long.

    The cost model sees no gain, but collectives may take longer than it estimates.
    """
    for wait in block.wait_of.values():
        others = [position for position in order if position != wait]
        users = set(block.users[wait])
        first = next((i for i, position in enumerate(others) if position in users), len(others))
        moved = [*others[:first], wait, *others[first:]]
        if moved != order and peak_bytes(block, moved) <= limit_bytes:
            order = moved
    return order


def _tidy(block: Block, order: list[int], limit_bytes: int) -> list[int]:
    """Restore the original order of kernels between two starts or waits.

    The code is easier to read, and takes the same time.
    """
    runs = groupby(order, key=lambda i: not block.tasks[i].link_us and i not in block.starts_of)
    for is_kernels, run in [(key, list(run)) for key, run in runs]:
        if is_kernels:
            first = order.index(run[0])
            tidied = [*order[:first], *sorted(run), *order[first + len(run) :]]
            if tidied != order and peak_bytes(block, tidied) <= limit_bytes:
                order = tidied
    return order
