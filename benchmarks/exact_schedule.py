"""OPT, the shortest order of a block: a yardstick for :mod:`sp_compiler.solve.list_schedule`.

A branch and bound over sets of tasks that have run. The live tensors after them, and so the memory
that the remaining tasks need, depend only on the set. Of the order only the clock and the times at
which the link is free and collectives arrive matter. If one of two orders of the same set is no
later in any of these, the other is discarded, as are states whose lower bound is not below the best
order's time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise

from sp_compiler.solve.block_schedule import Block, Memory, simulate
from sp_compiler.solve.list_schedule import list_schedule
from sp_compiler.solve.schedule_bound import least_us

_EPSILON_US = 1e-9  # sums of the same times in another order
_WHOLE = 7  # so many kernels, the longest, are counted as whole; the time grows as a power of it


@dataclass(frozen=True)
class Exact:
    """The best order that was found, and a time below which there is none.

    Attributes:
        proven: whether the search ended, so that no order is shorter.
        least_us: no order is shorter than this.
    """

    order: list[int]
    proven: bool
    least_us: float


@dataclass(frozen=True)
class _State:
    """Tasks that have run, in ``order``.

    Attributes:
        done: their set, one bit each.
        memory: between them and the rest.
        now_us: clock of the compute stream.
        link_free_us: when the link has carried all that was started.
        arrival_us: by start, of collectives that nobody has waited for.
    """

    done: int
    order: tuple[int, ...]
    memory: Memory
    now_us: float = 0.0
    link_free_us: float = 0.0
    arrival_us: Mapping[int, float] = field(default_factory=dict)

    def times_us(self) -> tuple[float, ...]:
        """Return all that the rest of the time depends on."""
        arrivals = (self.arrival_us[start] for start in sorted(self.arrival_us))
        return (self.now_us, self.link_free_us, *arrivals)


def exact_schedule(block: Block, limit_bytes: int, most_states: int = 100_000) -> Exact:
    """Return the shortest order of ``block`` whose peak is at most ``limit_bytes``.

    Args:
        limit_bytes: at least what the given order takes.
        most_states: after so many the search gives up; the bound stays true.
    """
    best = list_schedule(block, limit_bytes)
    best_us, bound_us = simulate(block, best).time_us, least_us(block)
    if best_us <= bound_us * (1 + 1e-9):
        return Exact(best, True, best_us)
    first = _State(0, (), Memory(block))
    queue = [(_bound_us(block, first), 0, 0, first)]
    seen: dict[int, list[tuple[float, ...]]] = {}
    expanded, tickets = 0, count(1)
    while queue and queue[0][0] < best_us - _EPSILON_US:
        bound_us, _, _, state = heapq.heappop(queue)
        if len(state.order) == len(block.tasks):
            best, best_us = list(state.order), max(state.now_us, state.link_free_us)
            continue
        expanded += 1
        if expanded > most_states:
            return Exact(best, False, max(bound_us, least_us(block)))
        for following in _following(block, state, limit_bytes):
            bound_us = _bound_us(block, following)
            if bound_us < best_us - _EPSILON_US and _is_new(following, seen):
                # Of equal bounds the one with fewest tasks left: it is complete first.
                entry = (bound_us, -len(following.order), next(tickets), following)
                heapq.heappush(queue, entry)
    return Exact(best, True, best_us)


def _following(block: Block, state: _State, limit_bytes: int) -> Iterator[_State]:
    """States after one more task, as far as memory allows it."""
    ready = [
        position
        for position, task in enumerate(block.tasks)
        if not state.done >> position & 1 and all(state.done >> n & 1 for n in task.needs)
    ]
    for position in ready:
        start = block.starts_of.get(position)
        if start is not None and state.arrival_us[start] <= state.now_us:
            ready = [
                position
            ]  # it takes no time and only frees memory, so no other task needs to be tried
            break
    for position in ready:
        memory = state.memory.copy()
        if memory.run(position) <= limit_bytes:
            yield _after(block, state, position, memory)


def _after(block: Block, state: _State, position: int, memory: Memory) -> _State:
    task, now_us, link_free_us = block.tasks[position], state.now_us, state.link_free_us
    arrival_us = dict(state.arrival_us)
    if task.link_us:
        link_free_us = max(now_us, link_free_us) + task.link_us
        if position in block.wait_of:
            arrival_us[position] = link_free_us
        else:
            now_us = link_free_us
    elif task.waits_for is not None:
        now_us = max(now_us, arrival_us.pop(task.waits_for))
    done, order = state.done | 1 << position, (*state.order, position)
    return _State(done, order, memory, now_us + task.time_us, link_free_us, arrival_us)


def _bound_us(block: Block, state: _State) -> float:
    """A lower bound for the time of all orders that begin with ``state``."""
    left = [i for i in range(len(block.tasks)) if not state.done >> i & 1]
    compute_us = state.now_us + sum(block.tasks[i].time_us for i in left)
    # Sent one after another; after the last of them come the tasks that depend on it.
    sent = [i for i in left if block.tasks[i].link_us]
    link_us = max(state.link_free_us, state.now_us if sent else 0.0)
    link_us += sum(block.tasks[i].link_us for i in sent)
    link_us += min((block.to_end_us[i] - block.tasks[i].link_us for i in sent), default=0.0)
    path_us = state.now_us + max((block.to_end_us[i] for i in left), default=0.0)
    arriving_us = (
        arrival_us + block.to_end_us[block.wait_of[start]]
        for start, arrival_us in state.arrival_us.items()
    )
    return max(compute_us, link_us, path_us, *arriving_us)


def _is_new(state: _State, seen: dict[int, list[tuple[float, ...]]]) -> bool:
    """Return whether no known order of the same tasks is at least as good; remember this one."""
    times_us = state.times_us()
    others = seen.setdefault(state.done, [])
    if any(all(a <= b for a, b in zip(other, times_us, strict=True)) for other in others):
        return False
    others.append(times_us)
    return True


def least_of_many_us(block: Block, chain: Collection[int]) -> float:
    """Return a lower bound for the time per block in any order of many equal consecutive blocks.

    Collectives of the chain leave gaps between its kernels. In a gap other kernels run, of any
    block and in any order, but each undivided: the remainder of the gap is idle, and a kernel that
    is too long for it delays the chain.

    Args:
        chain: the tasks of ``block`` between its incoming gradients and its outgoing ones.
    """
    link = [i for i in chain if block.tasks[i].link_us]
    paths: dict[int, tuple[float, tuple[int, ...]]] = {}  # by its last, the longest of collectives
    for start in sorted(link):
        before = [path for last, path in paths.items() if _behind(block, last) >> start & 1]
        longest_us, path = max(before, default=(0.0, ()))
        paths[start] = (longest_us + block.tasks[start].link_us, (*path, start))
    _, path = max(paths.values(), default=(0.0, ()))
    ordered = [
        i for i in chain if all((block.before[c] | _behind(block, c)) >> i & 1 for c in path)
    ]
    # Without a kernel between them, two collectives leave one gap; the first follows the last.
    kernels = sum(1 << i for i in ordered if block.times_us[i])
    gaps_us = [block.tasks[start].link_us for start in path[:1]]
    for first, second in pairwise(path):
        own_us = block.tasks[second].link_us
        if _behind(block, first) & block.before[second] & kernels:
            gaps_us.append(own_us)
        else:
            gaps_us[-1] += own_us
    if len(gaps_us) > 1 and not (block.before[path[0]] | _behind(block, path[-1])) & kernels:
        gaps_us[0] += gaps_us.pop()
    others = {*range(len(block.tasks))} - {*ordered}
    times_us = sorted((block.times_us[i] for i in others), reverse=True)
    idle_us = _least_idle_us(gaps_us, times_us[:_WHOLE]) - sum(times_us[_WHOLE:])
    return block.compute_us + max(0.0, idle_us)


def _behind(block: Block, start: int) -> int:
    return block.behind[block.wait_of.get(start, start)]


def _least_idle_us(gaps_us: list[float], times_us: list[float]) -> float:
    """Return the least that kernels of ``times_us`` leave idle in gaps, each whole in one of them
    or in none."""

    @cache
    def idle_us(index: int, left_us: tuple[float, ...]) -> float:
        if index == len(times_us):
            return sum(max(0.0, left) for left in left_us)
        ways = [idle_us(index + 1, left_us)]
        for gap, left in enumerate(left_us):
            if left > 0:
                after = sorted((*left_us[:gap], left - times_us[index], *left_us[gap + 1 :]))
                ways.append(idle_us(index + 1, tuple(after)))
        return min(ways)

    return idle_us(0, tuple(sorted(gaps_us)))
