"""Which of several ways to run a backward takes least time, and how much less is worth it."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.solve.list_schedule import ListSchedule

# Part of a backward's time, 2 % of a tenth that is communication. Below it three more functions to
# compile and to read gain too little.
WORTH_MORE_FUNCTIONS = 0.002
# Memory beyond the step's own peak is taken in so many parts, as few as make a backward as fast as
# all of them, but for this share of its time: of 10 % communication that is 1 %.
PARTS_BEYOND, WORTH_MORE_MEMORY = 4, 0.001
ROUNDING = 1e-6  # of sums of the same times in another order


def quickest_of(ways: Sequence[ListSchedule], room_bytes: int) -> ListSchedule:
    """Return the way that takes least time; of equal ones the first."""
    quickest = ways[0]
    for each in ways[1:]:
        # Most need no schedule: one before them takes the time of all kernels.
        if each.least_us * (1 + ROUNDING) < quickest.quick_us(room_bytes):
            quickest = min(quickest, each, key=lambda way: way.quick_us(room_bytes))
    return quickest
