"""List schedule of a block: an order in which kernels overlap with collectives.

In its original order, a block alternates between the two. The schedule walks along that order with
a clock. The next kernel is the first whose operands are ready; kernels that a collective depends on
(the critical path and its recomputation) go first, and others, mostly weight gradients, fill the
time in which the former wait. This is the policy HEU of Lynx for one block (Chen et al. 2024, arXiv
2406.08756): it is found once for all equal blocks. If a walk leaves the compute stream idle,
further walks with other priorities follow.

Memory: at each step, the rest of the block can still run below the limit in an order that is known
to fit (the original one, later the best so far), so that every walk completes.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product

from sp_compiler.solve.block_schedule import Block, Memory, least_us, peak_bytes, simulate

# How far a kernel may fall behind others of the given order. It bounds the time to schedule a model
# that is one region of thousands of kernels; blocks are shorter.
_REACH = 400
# Collectives that take twice as long as the model of the hardware says: an order that hides them
# too is better than one that hides them just so.
_SLOW_LINK, _SLOW_WEIGHT = 2.0, 0.1
# Walks that improve on the ones before by their own clock; it settles after two or three.
_TIMED_WALKS = 4
# "Soon" for a kernel that spares itself: less than this share of its own time.
_SOON = 0.5
# Kernels of a tenth of the collectives' time hide next to nothing, in whatever order.
_WORTH_HIDING = 0.1
# Tasks in all walks with changed ranks together: at most about 0.3 s for a block. A walk takes more
# than in proportion to the tasks, so a model that is one long region gets the timed walks alone.
_TASKS_WALKED, _PATIENCE, _MOST_TASKS = 20_000, 50, 400
_ROUNDING = 1e-6  # of sums of the same times in another order


@dataclass(frozen=True)
class _Wishes:
    """Priorities between tasks that may run at the same time.

    Attributes:
        ranks: priority by task; the lowest comes first.
        latest_us: by start, the time until which it may be delayed; others start as soon as
            possible.
        sparing: whether to wait for what arrives soon, rather than spend a long kernel that could
            hide all of another collective.
    """

    ranks: tuple[float, ...]
    latest_us: Mapping[int, float] = field(default_factory=dict)
    sparing: bool = False


@dataclass(frozen=True)
class _Scored:
    order: list[int]
    wishes: _Wishes
    time_us: float
    cost_us: float


def list_schedule(block: Block, limit_bytes: int, *, quick: bool = False) -> list[int]:
    """Return an order of the tasks of ``block`` with low time, as positions.

    The result is the same for the same block, on every rank.

    Args:
        limit_bytes: limit for :func:`peak_bytes`; if the original order needs more, its peak is the
            limit.
        quick: only walk as priorities that are known beforehand say, to compare blocks.
    """
    given = list(range(len(block.tasks)))
    limit_bytes = max(limit_bytes, peak_bytes(block, given))
    best = _scored(block, given, _Wishes((0.0,) * len(given)))
    fitting, bound_us = _Fitting(block, given), least_us(block) * (1 + _ROUNDING)
    priorities = (_in_given_order(block), _by_longest_path(block), _by_next_collective(block))
    for sparing, ranks in product((False, True), priorities):
        if sparing and best.time_us <= bound_us:
            break
        wishes = _Wishes(ranks, sparing=sparing)
        # The first walk starts collectives as soon as their operands are there, the others as late
        # as the walk before them shows to do.
        for _ in range(_TIMED_WALKS):
            walked = _walked(block, limit_bytes, wishes, fitting)
            best = min(best, walked, key=lambda scored: scored.cost_us)
            latest_us = _latest_starts(block, walked.order)
            if latest_us == wishes.latest_us:
                break  # the same wishes lead to the same walk
            wishes = replace(wishes, latest_us=latest_us)
    link_us = sum(task.link_us for task in block.tasks)
    if quick:
        return best.order
    if block.compute_us > _WORTH_HIDING * link_us and len(given) <= _MOST_TASKS:
        best = _climb(block, limit_bytes, best, bound_us)
    return _tidy(block, _late_waits(block, best.order, limit_bytes), limit_bytes)


def _in_given_order(block: Block) -> tuple[float, ...]:
    """Ranks by which what a collective needs comes first, and of waits, that nothing waits idly."""
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


def _scored(block: Block, order: list[int], wishes: _Wishes) -> _Scored:
    time_us = simulate(block, order).time_us
    slow_us = simulate(block, order, _SLOW_LINK).time_us
    return _Scored(order, wishes, time_us, time_us + _SLOW_WEIGHT * slow_us)


class _Fitting:
    """An order that is known to fit, to which a walk can return at any time.

    Attributes:
        order: its tasks.
        place: index in ``order``, by task.
        reached_bytes: bytes that exist while a task runs, by its index in ``order``.
        can_run: whether a task can run after a set of others (one bit each), as far as that was
            asked: most walks meet the sets of the walks before.
    """

    def __init__(self, block: Block, order: Sequence[int]) -> None:
        self.order = order
        memory = Memory(block)
        self.reached_bytes = [memory.run(position) for position in order]
        self.place = {position: place for place, position in enumerate(order)}
        self.can_run: dict[tuple[int, int], bool] = {}


def _walked(block: Block, limit_bytes: int, wishes: _Wishes, fitting: _Fitting) -> _Scored:
    return _scored(block, _Walk(block, limit_bytes, wishes, fitting).order(), wishes)


def _climb(block: Block, limit_bytes: int, best: _Scored, bound_us: float) -> _Scored:
    """Repeat the walk with a few changed priorities and latest starts, as long as that finds better
    orders, of which none takes less than ``bound_us``.

    Orders are not changed directly, because few changes would respect the limit on memory.
    """
    # Seeded, for every rank has to find the same; ``random`` is the one method whose numbers are
    # the same in all versions of Python.
    draw = random.Random(0).random
    tasks, starts = len(block.tasks), list(block.wait_of)
    fitting, failures = _Fitting(block, best.order), 0
    for _ in range(_TASKS_WALKED // max(1, tasks)):
        if best.time_us <= bound_us or failures >= _PATIENCE:
            break
        ranks, latest_us = list(best.wishes.ranks), dict(best.wishes.latest_us)
        for _ in range(1 + int(draw() * 4)):
            ranks[int(draw() * tasks)] = ranks[int(draw() * tasks)] + draw() - 0.5
        if draw() < 0.5:
            start = starts[int(draw() * len(starts))]
            latest_us[start] = draw() * best.time_us if draw() < 0.5 else 0.0
        changed = replace(best.wishes, ranks=tuple(ranks), latest_us=latest_us)
        walked = _walked(block, limit_bytes, changed, fitting)
        failures += 1
        if walked.cost_us < best.cost_us:
            fitting, failures = _Fitting(block, walked.order), 0
        # Also one that is as good: from there other changes lead on.
        best = walked if walked.cost_us <= best.cost_us else best
    return best


def _latest_starts(block: Block, order: Sequence[int]) -> dict[int, float]:
    """Latest time to start each collective, by its start, so that nothing waits for it.

    A collective that is needed late, such as the gather of a saved shard, would otherwise delay one
    that the critical path waits for.
    """
    timeline = simulate(block, order)
    needed_us = {
        start: min((timeline.start_us[user] for user in block.users[wait]), default=math.inf)
        for start, wait in block.wait_of.items()
    }
    latest_us: dict[int, float] = {}
    link_us = math.inf
    # From the one that is needed last: each has to leave the link to the next in time.
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


class _Walk:
    """One walk along a block.

    Args:
        fitting: an order below ``limit_bytes``.
    """

    def __init__(self, block: Block, limit_bytes: int, wishes: _Wishes, fitting: _Fitting) -> None:
        self._block, self._limit_bytes, self._wishes = block, limit_bytes, wishes
        self._fitting = fitting
        self._memory = Memory(block)
        # Often all that the block ever makes fits at once, beside a head with a large vocabulary.
        most_bytes = sum(block.storage_bytes) + max(task.run_bytes for task in block.tasks)
        self._all_fit = most_bytes <= limit_bytes
        self._needs_left = [len(dict.fromkeys(task.needs)) for task in block.tasks]
        # What is ready, each list in order of preference: kernels by rank, starts by latest start,
        # waits by arrival.
        self._kernels: list[tuple[float, int]] = []
        self._starts: list[tuple[float, int]] = []
        self._waits: list[tuple[float, int]] = []
        self._done = 0  # a set, one bit per task
        self._first_left, self._last_done = 0, -1  # places in ``fitting``
        self._early_bytes = 0  # made by what ran before the first that is left there
        self._now_us = self._link_free_us = 0.0
        self._arrival_us: dict[int, float] = {}
        self._under_way: dict[int, None] = {}  # starts; a set with an order
        self._order: list[int] = []
        for position, left in enumerate(self._needs_left):
            if not left:
                self._add_ready(position)

    def order(self) -> list[int]:
        """Walk once."""
        while len(self._order) < len(self._block.tasks):
            self._run(self._next())
        return self._order

    def _next(self) -> int:
        arrival_us, wait = self._waits[0] if self._waits else (math.inf, -1)
        if arrival_us <= self._now_us:
            return wait  # costs nothing, and what was sent may go
        oldest = self._fitting.order[self._first_left]
        behind = self._last_done - self._first_left >= _REACH
        if behind and oldest not in self._block.starts_of:
            # What is on its way may have to arrive first, for until then what was sent is alive.
            return oldest if self._fits(oldest) else wait
        kernel = next((kernel for _, kernel in self._kernels if self._fits(kernel)), None)
        start = self._start_before(kernel)
        if start is not None:
            return start
        if kernel is not None and self._spares(kernel, arrival_us):
            return wait
        # A wait that ranks before the kernel: so long a kernel would delay what follows the wait.
        ranks = self._wishes.ranks
        if kernel is not None and all(ranks[kernel] < ranks[wait] for _, wait in self._waits):
            return kernel
        # Nothing to do meanwhile, or nothing that fits: the clock goes on to the next arrival. With
        # nothing under way, the next of the order that fits does fit.
        return wait if self._waits else oldest

    def _spares(self, kernel: int, arrival_us: float) -> bool:
        """Return whether ``kernel``, which no collective needs, is too long to hide the rest of
        what arrives then."""
        soon_us = _SOON * self._block.tasks[kernel].time_us
        spared = self._wishes.sparing and not self._block.leads_to_link[kernel]
        return spared and arrival_us - self._now_us < soon_us

    def _start_before(self, kernel: int | None) -> int | None:
        """Return the collective that has to start now, if the next kernel is ``kernel``."""
        ends_us = self._now_us
        if kernel is not None:
            ends_us += self._block.tasks[kernel].time_us
            if self._link_free_us > ends_us:
                return None  # it would only queue, before one that may become more urgent
        for latest_us, start in self._starts:
            if (kernel is None or latest_us < ends_us) and self._fits(start):
                return start
        return None

    def _fits(self, position: int) -> bool:
        """Return whether after ``position`` the rest can run in the order that fits."""
        if self._all_fit:
            return True
        key = self._done, position
        if key not in self._fitting.can_run:
            self._fitting.can_run[key] = self._returns_after(position)
        return self._fitting.can_run[key]

    def _returns_after(self, position: int) -> bool:
        if self._memory.live_bytes + self._block.tasks[position].run_bytes > self._limit_bytes:
            return False
        # Behind the last task that has run everything is as in that order. Until then there is at
        # most what exists in it, and what was made early.
        last = max(self._last_done, self._fitting.place[position])
        most_bytes = max(self._fitting.reached_bytes[self._first_left : last + 1])
        early_bytes = self._early_bytes + self._block.made_bytes[position]
        if most_bytes + early_bytes <= self._limit_bytes:
            return True
        memory = self._memory.copy()
        memory.run(position)
        # First what is under way arrives, which only frees memory.
        wait_of = self._block.wait_of
        waits = [wait_of[start] for start in (*self._under_way, position) if start in wait_of]
        for wait in waits:
            memory.run(wait)
        for later in self._fitting.order[self._first_left : last + 1]:
            left = not self._done >> later & 1 and later != position and later not in waits
            if left and memory.run(later) > self._limit_bytes:
                return False
        return True

    def _run(self, position: int) -> None:
        task = self._block.tasks[position]
        if self._block.communicates(position):
            self._link_free_us = max(self._now_us, self._link_free_us) + task.link_us
            self._arrival_us[position] = self._link_free_us
            if position in self._block.wait_of:
                self._under_way[position] = None
            else:
                self._now_us = self._link_free_us
        elif task.waits_for is not None:
            del self._under_way[task.waits_for]
            self._now_us = max(self._now_us, self._arrival_us[task.waits_for])
        self._now_us += task.time_us
        self._memory.run(position)
        self._order.append(position)
        self._done |= 1 << position
        self._last_done = max(self._last_done, self._fitting.place[position])
        order = self._fitting.order
        self._early_bytes += self._block.made_bytes[position]
        while self._first_left < len(order) and self._done >> order[self._first_left] & 1:
            self._early_bytes -= self._block.made_bytes[order[self._first_left]]
            self._first_left += 1
        ready, key = self._place_ready(position)
        ready.remove((key, position))
        for user in self._block.users[position]:
            self._needs_left[user] -= 1
            if not self._needs_left[user]:
                self._add_ready(user)

    def _place_ready(self, position: int) -> tuple[list[tuple[float, int]], float]:
        """Return the list that has a task while it is ready, and its key there."""
        if position in self._block.starts_of:
            return self._waits, self._arrival_us[self._block.starts_of[position]]
        if position in self._block.wait_of:
            return self._starts, self._wishes.latest_us.get(position, 0.0)
        return self._kernels, self._wishes.ranks[position]

    def _add_ready(self, position: int) -> None:
        ready, key = self._place_ready(position)
        insort(ready, (key, position))
