"""Order of a block's kernels and collectives on one rank, on plain data; knows no graph.

A kernel occupies the compute stream. A collective is two tasks: its *start* queues it on the link,
which runs one collective after another in the order of their starts, and its *wait* blocks the
compute stream until it is complete. :func:`simulate` returns the time of an order, and
:func:`peak_bytes` its memory. :mod:`sp_compiler.solve.list_schedule` searches for a good order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

_BITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True)
class Task:
    """A kernel, the start of a collective, or the wait for one.

    Attributes:
        needs: positions of the tasks that must run before it.
        time_us: time of the kernel on the compute stream; 0 for starts and waits.
        link_us: time of the collective on the link. If no other task ``waits_for`` it, the task
            blocks the compute stream until its collective is complete.
        waits_for: position of the start, if the task is a wait.
        makes: storages that exist after it has run.
        reads: storages that must exist while it runs.
        run_bytes: additional bytes while it runs: its results, including unused ones, and scratch
            memory.
    """

    needs: tuple[int, ...] = ()
    time_us: float = 0.0
    link_us: float = 0.0
    waits_for: int | None = None
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    run_bytes: int = 0


@dataclass(frozen=True)
class Block:
    """Tasks in a valid order, and the storages between them.

    Attributes:
        tasks: each after those that it needs.
        storage_bytes: bytes by storage.
        returned: storages that outlive the block; the others are freed after the last task that
            makes or reads them.
    """

    tasks: tuple[Task, ...]
    storage_bytes: tuple[int, ...] = ()
    returned: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the tasks that need a task, by its position."""
        users: list[list[int]] = [[] for _ in self.tasks]
        for position, task in enumerate(self.tasks):
            for needed in dict.fromkeys(task.needs):
                users[needed].append(position)
        return tuple(map(tuple, users))

    @cached_property
    def wait_of(self) -> Mapping[int, int]:
        """Position of the wait by that of its start."""
        return {t.waits_for: i for i, t in enumerate(self.tasks) if t.waits_for is not None}

    @cached_property
    def starts_of(self) -> Mapping[int, int]:
        """Position of the start by that of its wait."""
        return {wait: start for start, wait in self.wait_of.items()}

    def communicates(self, position: int) -> bool:
        """Return whether a task is a collective, or the start of one."""
        # On a link without latency a collective of no bytes, or at infinite bandwidth, takes 0 us.
        return self.tasks[position].link_us > 0 or position in self.wait_of

    def blocks(self, position: int) -> bool:
        """Return whether a task is a collective that the compute stream waits for where it
        starts."""
        return self.communicates(position) and position not in self.wait_of

    @cached_property
    def on_link(self) -> tuple[bool, ...]:
        """Whether a task is a collective, or the start of one or the wait for it, by its
        position."""
        return tuple(self.communicates(i) or i in self.starts_of for i in range(len(self.tasks)))

    @cached_property
    def num_needs(self) -> tuple[int, ...]:
        """Number of the tasks that a task needs, by its position."""
        return tuple(len(dict.fromkeys(task.needs)) for task in self.tasks)

    @cached_property
    def times_us(self) -> tuple[float, ...]:
        """Kernel time, by position."""
        return tuple(task.time_us for task in self.tasks)

    @cached_property
    def leads_to_link(self) -> tuple[bool, ...]:
        """Whether some collective follows a task, by its position."""
        leads = [False] * len(self.tasks)
        for position in reversed(range(len(self.tasks))):
            users = self.users[position]
            leads[position] = any(leads[user] or self.tasks[user].link_us for user in users)
        return tuple(leads)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Storages that a task makes or reads and that die in the block, each once, by the task's
        position."""
        dying = [bool(size) for size in self.storage_bytes]
        for storage in self.returned:
            dying[storage] = False
        return tuple(
            tuple(each for each in dict.fromkeys((*task.makes, *task.reads)) if dying[each])
            for task in self.tasks
        )

    @cached_property
    def run_bytes(self) -> tuple[int, ...]:
        """Additional bytes while a task runs, by its position."""
        return tuple(task.run_bytes for task in self.tasks)

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Bytes of the storages that a task makes, by its position."""
        return tuple(sum(self.storage_bytes[made] for made in task.makes) for task in self.tasks)

    @cached_property
    def num_holders(self) -> tuple[int, ...]:
        """Number of tasks that make or read a storage that dies in the block."""
        counts = [0] * len(self.storage_bytes)
        for held in self.holders:
            for storage in held:
                counts[storage] += 1
        return tuple(counts)

    @cached_property
    def to_end_us(self) -> tuple[float, ...]:
        """Time of the longest path from a task to the end, itself included, by its position."""
        to_end_us = [0.0] * len(self.tasks)
        for position in reversed(range(len(self.tasks))):
            task = self.tasks[position]
            behind_us = max((to_end_us[user] for user in self.users[position]), default=0.0)
            to_end_us[position] = task.time_us + task.link_us + behind_us
        return tuple(to_end_us)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Tasks that must run before a task, one bit each, by its position."""
        # Sets of positions as bits of an integer: unions of thousands of them take no time.
        before = [0] * len(self.tasks)
        for position, task in enumerate(self.tasks):
            for needed in task.needs:
                before[position] |= before[needed] | 1 << needed
        return tuple(before)

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Tasks that must run after a task, in the same form."""
        behind = [0] * len(self.tasks)
        for position in reversed(range(len(self.tasks))):
            for user in self.users[position]:
                behind[position] |= behind[user] | 1 << user
        return tuple(behind)

    def kernels_us(self, tasks: int) -> float:
        """Return the time of the kernels among ``tasks``, a set with one bit each."""
        # As bytes of 0 and 1, first task first, so that no Python loop visits each task.
        bits = f"{tasks:b}"[::-1].encode().translate(_BITS)
        return sum(compress(self.times_us, bits))

    @cached_property
    def compute_us(self) -> float:
        """Time of all kernels."""
        return sum(self.times_us)

    @cached_property
    def link_us(self) -> float:
        """Time of all collectives."""
        return sum(task.link_us for task in self.tasks)

    @cached_property
    def most_bytes(self) -> int:
        """Bytes that no order exceeds: all that is ever made, plus the largest need of a task."""
        return sum(self.storage_bytes) + max(self.run_bytes, default=0)

    @cached_property
    def given_bytes(self) -> int:
        """Peak of the tasks in their own order."""
        return peak_bytes(self, range(len(self.tasks)))


@dataclass(frozen=True)
class Timeline:
    """When the tasks of an order run.

    Attributes:
        start_us: by position in the block, the time when the compute stream reaches the task.
        end_us: the time when it continues; immediately after a start.
        arrival_us: by the start's position, the time when its collective is complete.
        time_us: time until all kernels and collectives have ended.
        exposed_us: part of ``time_us`` during which the compute stream is idle.
    """

    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    arrival_us: Mapping[int, float]
    time_us: float
    exposed_us: float


def simulate(block: Block, order: Sequence[int], link_factor: float = 1.0) -> Timeline:
    """Run the tasks of ``block`` in ``order``.

    Args:
        link_factor: factor by which collectives take longer than in ``block``.
    """
    clock = Clock(block, link_factor)
    starts_us, ends_us = [0.0] * len(block.tasks), [0.0] * len(block.tasks)
    for position in order:
        starts_us[position] = clock.now_us
        clock.run(position)
        ends_us[position] = clock.now_us
    exposed_us = clock.time_us - block.compute_us
    return Timeline(tuple(starts_us), tuple(ends_us), clock.arrival_us, clock.time_us, exposed_us)


class Clock:
    """Time of the compute stream and of the link while tasks of a block run one after another.

    Args:
        link_factor: factor by which collectives take longer than in ``block``.

    Attributes:
        now_us: time of the compute stream.
        link_free_us: when the link has carried all that was started.
        arrival_us: by start, when its collective is complete.
        least_us: a time before which the block does not end, whatever runs from here on.
    """

    def __init__(self, block: Block, link_factor: float = 1.0) -> None:
        self.now_us = self.link_free_us = 0.0
        self.arrival_us: dict[int, float] = {}
        self.least_us = block.compute_us
        self._block, self._factor = block, link_factor
        self._idle_us, self._link_left_us = 0.0, block.link_us * link_factor

    @property
    def time_us(self) -> float:
        """The time when all has run, including collectives that no task waited for."""
        return max(self.now_us, self.link_free_us)

    def run(self, position: int) -> None:
        """Run a task."""
        block = self._block
        if block.on_link[position]:
            if position in block.starts_of:
                self._wait(block.starts_of[position])
            else:
                self._send(position)
        self.now_us += block.times_us[position]

    def _send(self, position: int) -> None:
        link_us = self._block.tasks[position].link_us
        # One link: a collective begins when the one before has ended.
        arrival_us = max(self.now_us, self.link_free_us) + link_us * self._factor
        self.link_free_us = self.arrival_us[position] = arrival_us
        self._link_left_us -= link_us * self._factor
        behind_us = max(self._link_left_us, self._block.to_end_us[position] - link_us)
        self.least_us = max(self.least_us, arrival_us + behind_us)
        if position not in self._block.wait_of:  # it has no wait: it blocks where it starts
            self._wait(position)

    def _wait(self, start: int) -> None:
        idle_us = self.arrival_us[start] - self.now_us
        if idle_us > 0:
            self.now_us = self.arrival_us[start]
            self._idle_us += idle_us
            self.least_us = max(self.least_us, self._block.compute_us + self._idle_us)


def most_beside(block: Block) -> float:
    """Return the largest possible kernel time concurrent with a collective, relative to the
    collective's time."""
    most, every = 0.0, (1 << len(block.tasks)) - 1
    for start, wait in block.wait_of.items():
        ordered, link_us = block.before[start] | block.behind[wait], block.tasks[start].link_us
        beside_us = block.kernels_us(every & ~ordered)
        if beside_us:
            most = max(most, beside_us / link_us if link_us else math.inf)
    return most


def is_valid(block: Block, order: Sequence[int]) -> bool:
    """Return whether ``order`` has each task of ``block`` once, after those that it needs."""
    place = {position: index for index, position in enumerate(order)}
    return sorted(order) == list(range(len(block.tasks))) and all(
        place[needed] < place[position]
        for position, task in enumerate(block.tasks)
        for needed in task.needs
    )


def peak_bytes(block: Block, order: Sequence[int]) -> int:
    """Return the peak of bytes when ``block`` runs in ``order``."""
    return Memory(block).run_all(order, math.inf)


class Memory:
    """Storages that exist between the tasks of an order.

    It depends on the set of tasks that have run, not on their order.

    Attributes:
        live_bytes: bytes of the storages that exist.
    """

    def __init__(self, block: Block) -> None:
        self.live_bytes = 0
        self._block = block
        self._holders_left = list(block.num_holders)

    def copy(self) -> Memory:
        """Return an independent copy in the same state."""
        twin = Memory.__new__(Memory)
        twin.live_bytes, twin._block = self.live_bytes, self._block
        twin._holders_left = self._holders_left.copy()
        return twin

    def run(self, position: int) -> int:
        """Run a task and return the bytes that exist while it runs."""
        block, left = self._block, self._holders_left
        reached_bytes = self.live_bytes + block.run_bytes[position]
        self.live_bytes += block.made_bytes[position]
        # A result that nothing reads dies with the task that makes it.
        for storage in block.holders[position]:
            left[storage] -= 1
            if not left[storage]:
                self.live_bytes -= block.storage_bytes[storage]
        return reached_bytes

    def run_all(self, order: Iterable[int], limit_bytes: float) -> int:
        """Run tasks, up to the first during which more than ``limit_bytes`` exist, and return the
        most bytes that existed."""
        # The same as calling `run`, inlined: walks run this so often that the calls would make them
        # 10 % slower.
        block, left, live_bytes, most_bytes = self._block, self._holders_left, self.live_bytes, 0
        run_bytes, made_bytes, holders = block.run_bytes, block.made_bytes, block.holders
        sizes = block.storage_bytes
        for position in order:
            reached_bytes = live_bytes + run_bytes[position]
            if reached_bytes > most_bytes:
                most_bytes = reached_bytes
                if reached_bytes > limit_bytes:
                    break
            live_bytes += made_bytes[position]
            for storage in holders[position]:
                left[storage] -= 1
                if not left[storage]:
                    live_bytes -= sizes[storage]
        self.live_bytes = live_bytes
        return most_bytes
