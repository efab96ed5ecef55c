"""A walk along a block with a clock, which gives one order of its tasks, according to priorities.

Memory: at each step, the rest of the block can still run below the limit in an order that is known
to fit, so that every walk completes.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress

from sp_compiler.solve.block_schedule import Block, Clock, Memory, simulate

# How far a task may be overtaken by others, in positions of the order that fits. It limits the time
# to schedule a model that is one region of thousands of kernels; blocks are shorter.
_REACH = 400
# Orders are also timed with collectives twice as long as the hardware model says: an order that
# hides these too is better than one that only just hides the estimated ones.
SLOW_LINK, _SLOW_WEIGHT = 2.0, 0.1
# An arrival is "soon" for a long kernel: within less than this share of the kernel's time.
_SOON = 0.5
_ROUNDING = 1e-9  # of sums of the same times in another order


@dataclass(frozen=True)
class Priorities:
    """Priorities between tasks that may run at the same time.

    Attributes:
        ranks: priority by task; the lowest comes first.
        latest_us: by start, the time until which it may be delayed; others start as soon as
            possible.
        sparing: whether to wait for a collective that arrives soon, instead of using up a long
            kernel that could hide an entire later collective.
    """

    ranks: tuple[float, ...]
    latest_us: Mapping[int, float] = field(default_factory=dict)
    sparing: bool = False


class Fitting:
    """An order that is known to fit, to which a walk can return at any time.

    Attributes:
        order: its tasks.
        place: index in ``order``, by task.
        most_bytes: the most bytes that exist from a task on, by its index in ``order``.
        made_bytes: bytes of the storages that a task makes, by the same index.
        can_run: whether a task can run after a set of others (one bit each), cached: most walks
            meet the sets of the walks before.
        limits: whether something did not fit in some walk: with more memory the walk may differ.
        spends: whether some walk ran a kernel that it would not have run had it been sparing.
    """

    def __init__(self, block: Block, order: Sequence[int]) -> None:
        self.order = order
        memory = Memory(block)
        reached_bytes = [memory.run(position) for position in order]
        self.most_bytes = [0, *accumulate(reversed(reached_bytes), max)][::-1]
        self.made_bytes = [block.made_bytes[position] for position in order]
        self.place = {position: place for place, position in enumerate(order)}
        self.limits = self.spends = False
        self.can_run: dict[tuple[int, int], bool] = {}


@dataclass(frozen=True)
class Walked:
    """The order of a walk.

    Attributes:
        time_us: of the order.
        cost_us: time plus a fraction of the time on a slow link: the measure to compare orders by.
        fitting: the order to which the walk could return.
        start_us: when the compute stream reaches each task, by position.
    """

    order: list[int]
    priorities: Priorities
    time_us: float
    cost_us: float
    fitting: Fitting
    start_us: Sequence[float]


def as_given(block: Block) -> Walked:
    """Return the order of ``block`` itself, as if a walk without priorities had found it."""
    order = list(range(len(block.tasks)))
    timeline, slow = simulate(block, order), simulate(block, order, SLOW_LINK)
    priorities = Priorities((0.0,) * len(order))
    fitting = Fitting(block, order)
    cost = cost_us(timeline.time_us, slow.time_us)
    return Walked(order, priorities, timeline.time_us, cost, fitting, timeline.start_us)


def walked(
    block: Block,
    limit_bytes: int,
    priorities: Priorities,
    fitting: Fitting,
    most_us: float = math.inf,
) -> Walked | None:
    """Walk once along ``block``; return ``None`` if the order would cost more than ``most_us``.

    Args:
        fitting: an order below ``limit_bytes``; walks with the same limit may share it.
    """
    return _Walk(block, limit_bytes, priorities, fitting).walked(most_us)


def cost_us(time_us: float, slow_us: float) -> float:
    """Return what orders are compared by, from their times on the link and on a slow one."""
    return time_us + _SLOW_WEIGHT * slow_us


class _Walk:
    def __init__(
        self, block: Block, limit_bytes: int, priorities: Priorities, fitting: Fitting
    ) -> None:
        self._block, self._limit_bytes, self._priorities = block, limit_bytes, priorities
        self._fitting, self._rank_of = fitting, priorities.ranks
        self._on_link, self._times_us, self._users = block.on_link, block.times_us, block.users
        self._run_bytes, self._made_bytes = block.run_bytes, block.made_bytes
        self._memory = Memory(block)
        # Often everything that the block ever makes fits at once: the limit is then the peak of a
        # head with a large vocabulary.
        self._all_fit = block.most_bytes <= limit_bytes
        self._needs_left = list(block.num_needs)
        # What is ready, each list in order of preference: kernels by rank, starts by latest start,
        # waits by arrival.
        self._kernels: list[tuple[float, int]] = []
        self._starts: list[tuple[float, int]] = []
        self._waits: list[tuple[float, int]] = []
        self._done = 0  # a set, one bit per task
        self._first_left, self._last_done = 0, -1  # places in ``fitting``
        self._early_bytes = 0  # made by tasks that ran before their turn
        self._left = bytearray(b"\1") * len(block.tasks)  # by place, whether its task has not run
        self._clock, self._slow_clock = Clock(block), Clock(block, SLOW_LINK)
        self._start_us = [0.0] * len(block.tasks)
        self._under_way: dict[int, None] = {}  # starts; a set with an order
        self._order: list[int] = []
        for position, left in enumerate(self._needs_left):
            if not left:
                self._add_ready(position)

    def walked(self, most_us: float) -> Walked | None:
        """Walk once."""
        on_link, clock, slow_clock = self._on_link, self._clock, self._slow_clock
        most_us *= 1 + _ROUNDING
        for _ in self._block.tasks:
            position = self._next()
            self._run(position)
            # Only tasks on the link change the clocks' lower bounds.
            if on_link[position] and cost_us(clock.least_us, slow_clock.least_us) > most_us:
                return None
        return Walked(
            self._order,
            self._priorities,
            clock.time_us,
            cost_us(clock.time_us, slow_clock.time_us),
            self._fitting,
            self._start_us,
        )

    def _next(self) -> int:
        now_us, waits = self._clock.now_us, self._waits
        arrival_us, wait = waits[0] if waits else (math.inf, -1)
        if arrival_us <= now_us:
            return wait  # costs nothing, and frees what was sent
        oldest = self._fitting.order[self._first_left]
        behind = self._last_done - self._first_left >= _REACH
        if behind and oldest not in self._block.starts_of:
            # Collectives under way may have to arrive first: until then their operands are alive.
            return oldest if self._fits(oldest) else wait
        kernel = self._first_fitting()
        start = self._start_before(kernel) if self._starts else None
        if start is not None:
            return start
        if kernel is not None:
            if not waits:
                return kernel
            # A wait that ranks before the kernel: a long kernel would delay what follows the wait.
            ranks = self._rank_of
            if ranks[kernel] < min([ranks[each] for _, each in waits]):
                spares = self._spares(kernel, arrival_us - now_us)
                if not (spares and self._priorities.sparing):
                    self._fitting.spends |= spares
                    return kernel
        # No other work, or none that fits: the clock goes on to the next arrival. With nothing
        # under way, the next task of the order that fits does fit.
        return wait if waits else oldest

    def _first_fitting(self) -> int | None:
        """Return the kernel that goes first among those that fit."""
        if self._all_fit:
            return self._kernels[0][1] if self._kernels else None
        # For most, two sums show that they fit, computed here without a call for each.
        run_bytes, made_bytes, limit_bytes = self._run_bytes, self._made_bytes, self._limit_bytes
        free_bytes = limit_bytes - self._memory.live_bytes
        early_bytes = self._fitting.most_bytes[self._first_left] + self._early_bytes
        free_later_bytes = limit_bytes - early_bytes
        for _, each in self._kernels:
            if run_bytes[each] <= free_bytes and made_bytes[each] <= free_later_bytes:
                return each
            if self._fits(each):
                return each
        return None

    def _spares(self, kernel: int, left_us: float) -> bool:
        """Return whether running ``kernel`` would waste it: no collective needs it, and it is much
        longer than the rest of the collective that arrives next."""
        soon = left_us < _SOON * self._times_us[kernel]
        return soon and not self._block.leads_to_link[kernel]

    def _start_before(self, kernel: int | None) -> int | None:
        """Return the collective that has to start now if the next kernel is ``kernel``."""
        ends_us = self._clock.now_us
        if kernel is not None:
            ends_us += self._times_us[kernel]
            if self._clock.link_free_us > ends_us:
                return None  # it would only queue, ahead of one that may become more urgent
        for latest_us, start in self._starts:
            if (kernel is None or latest_us < ends_us) and self._fits(start):
                return start
        return None

    def _fits(self, position: int) -> bool:
        """Return whether, after ``position``, the rest can run in the order that fits."""
        if self._all_fit:
            return True
        if self._memory.live_bytes + self._block.run_bytes[position] > self._limit_bytes:
            self._fitting.limits = True
            return False
        # The rest fits without it. The next task of the order that fits, or one that makes nothing,
        # brings nothing into existence earlier.
        is_next = position == self._fitting.order[self._first_left]
        made_bytes = self._block.made_bytes[position]
        if is_next or not made_bytes:
            return True
        early_bytes = self._early_bytes + made_bytes
        if self._fitting.most_bytes[self._first_left] + early_bytes <= self._limit_bytes:
            return True  # even if nothing that was made early dies before the end
        key, known = (self._done, position), self._fitting.can_run
        if key not in known:
            known[key] = self._returns_after(position)
            self._fitting.limits |= not known[key]
        return known[key]

    def _returns_after(self, position: int) -> bool:
        # Collectives under way arrive, which only frees memory. Then the tasks that ``position``
        # overtook run while its results exist. The tasks after it in the order that fits find no
        # more memory in use than without it.
        wait_of, place = self._block.wait_of, self._fitting.place
        arrive = [wait_of[start] for start in (*self._under_way, position) if start in wait_of]
        left = self._left.copy()
        for each in arrive:
            left[place[each]] = 0
        passed = slice(self._first_left, place[position])
        order = chain((position, *arrive), compress(self._fitting.order[passed], left[passed]))
        return self._memory.copy().run_all(order, self._limit_bytes) <= self._limit_bytes

    def _run(self, position: int) -> None:
        on_link, rank_of, kernels = self._on_link, self._rank_of, self._kernels
        self._start_us[position] = self._clock.now_us
        if on_link[position]:
            self._run_on_link(position)
        else:  # most tasks, inlined to save five calls
            kernels.remove((rank_of[position], position))
            time_us = self._times_us[position]
            self._clock.now_us += time_us
            self._slow_clock.now_us += time_us
        self._order.append(position)
        self._done |= 1 << position
        if not self._all_fit:
            self._memory.run(position)
        self._move_on(position)
        needs_left = self._needs_left
        for user in self._users[position]:
            needs_left[user] -= 1
            if not needs_left[user]:
                if on_link[user]:
                    self._add_ready(user)
                else:
                    insort(kernels, (rank_of[user], user))

    def _run_on_link(self, position: int) -> None:
        ready, key = self._place_ready(position)
        ready.remove((key, position))
        self._clock.run(position)
        self._slow_clock.run(position)
        if position in self._block.wait_of:
            self._under_way[position] = None
        elif position in self._block.starts_of:
            del self._under_way[self._block.starts_of[position]]

    def _move_on(self, position: int) -> None:
        """Record that ``position`` has run in the state of the order that fits."""
        left, made_bytes = self._left, self._fitting.made_bytes
        place = self._fitting.place[position]
        left[place] = 0
        self._early_bytes += made_bytes[place]
        if place > self._last_done:
            self._last_done = place
        if place == self._first_left:
            next_left = left.find(1, place)
            self._first_left = len(left) if next_left < 0 else next_left
            self._early_bytes -= sum(made_bytes[place : self._first_left])

    def _add_ready(self, position: int) -> None:
        ready, key = self._place_ready(position)
        insort(ready, (key, position))

    def _place_ready(self, position: int) -> tuple[list[tuple[float, int]], float]:
        """Return the list that has a task on the link while it is ready, and its key there."""
        if position in self._block.starts_of:
            return self._waits, self._clock.arrival_us[self._block.starts_of[position]]
        if position in self._block.wait_of:
            return self._starts, self._priorities.latest_us.get(position, 0.0)
        return self._kernels, self._rank_of[position]  # without a wait: it blocks where it starts
