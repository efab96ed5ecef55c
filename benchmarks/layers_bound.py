"""A time that no order of many equal layers takes less than, per layer."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import pairwise

from sp_compiler.solve.block_schedule import Block

_WHOLE = 7  # so many kernels, the longest, are counted as whole; the time grows as a power of it


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
