"""Cut a chain of calls into pipeline stages so that the slowest stage is as fast as possible.

Exact, by dynamic programming over the calls before a cut.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence

Cost = Callable[[int, int, int], float]
"""``cost(stage, start, stop)`` of calls ``start`` to ``stop - 1`` as that stage; infinite if they
cannot be that stage."""


def fastest_cut(times_us: Sequence[float], num_stages: int, added_us: Cost) -> list[int] | None:
    """Return where each stage ends; ``None`` if no cut fits.

    Of the cuts with the fastest slowest stage, it has the least sum of squared times, which
    balances the other stages. Every stage has a call.

    Args:
        times_us: time of each call.
        num_stages: at least 1.
        added_us: additional time of a stage, such as recomputation to fit in memory; infinite if it
            cannot fit, never negative. It may depend on the stage, because the first ones have most
            microbatches in flight.
    """
    until_us = [0.0, *itertools.accumulate(times_us)]

    def time_us(stage: int, start: int, stop: int) -> float:
        return until_us[stop] - until_us[start] + added_us(stage, start, stop)

    # No stage needs to be longer than a limit that some cut satisfies, so longer stages need not be
    # examined. Most chains have a cut that satisfies one near the mean.
    mean_us = max(until_us[-1] / num_stages, max(times_us, default=0.0))
    slowest = None
    for factor in (1.05, 1.3, 2.0, math.inf):
        longest_us = mean_us * factor if mean_us else math.inf

        def last_stop(start: int, longest_us: float = longest_us) -> int:
            # Sums in another order differ by rounding.
            return bisect_right(until_us, (until_us[start] + longest_us) * (1 + 1e-9)) - 1

        slowest = _best(len(times_us), num_stages, time_us, max, last_stop)
        # If every cut within the limit has added time, a longer stage without added time, which was
        # left out, may be faster.
        if slowest is not None and slowest[0] <= longest_us * (1 + 1e-9):
            break
    if slowest is None:
        return None
    limit_us = slowest[0] * (1 + 1e-9)

    def squared(stage: int, start: int, stop: int) -> float:
        taken_us = time_us(stage, start, stop)
        return taken_us**2 if taken_us <= limit_us else math.inf

    spread = _best(len(times_us), num_stages, squared, operator.add, last_stop)
    assert spread is not None
    return spread[1]


def least_largest(num_calls: int, num_stages: int, num_bytes: Cost) -> float:
    """Return the smallest possible size in bytes of the largest stage."""
    best = _best(num_calls, num_stages, num_bytes, max, lambda start: num_calls)
    return math.inf if best is None else best[0]


def _best(
    num_calls: int,
    num_stages: int,
    cost: Cost,
    combine: Callable[[float, float], float],
    last_stop: Callable[[int], int],
) -> tuple[float, list[int]] | None:
    """Return the least combined cost of all stages, and where they end.

    Args:
        last_stop: for each call, the latest end of a part that begins there.
    """
    # By number of calls before the cut: the best of the stages so far.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        left = num_stages - stage - 1
        for start, (before, ends) in best.items():
            # Each later stage needs a call; the last stage takes all that remain.
            stops = range(start + 1 if left else num_calls, num_calls - left + 1)
            for stop in itertools.takewhile(last_stop(start).__ge__, stops):
                total = combine(before, cost(stage, start, stop)) if stop > start else math.inf
                if total < following.get(stop, (math.inf, []))[0]:
                    following[stop] = total, [*ends, stop]
        best = following
    return best.get(num_calls)
