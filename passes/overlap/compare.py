"""Which of several ways to run a backward takes the least time, and which gains are worth it."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.solve.list_schedule import ListSchedule

# Share of a backward's time: 2 % of its communication if that is a tenth. For less, three more
# functions to compile and to read are not worthwhile.
WORTH_MORE_FUNCTIONS = 0.002
# Memory beyond the step's own peak is allowed in this many parts. The fewest parts are used that
# make a backward as fast as all do, except for this share of its time: 1 % of 10 % communication.
PARTS_BEYOND, WORTH_MORE_MEMORY = 4, 0.001
ROUNDING = 1e-6  # of sums of the same times in another order


def quickest_of(ways: Sequence[ListSchedule], room_bytes: int) -> ListSchedule:
    """Return the way that takes the least time; of equal ones the first."""
    quickest = ways[0]
    for each in ways[1:]:
        # Most need no schedule: an earlier one already takes only the time of all kernels.
        if each.least_us * (1 + ROUNDING) < quickest.quick_us(room_bytes):
            quickest = min(quickest, each, key=lambda way: way.quick_us(room_bytes))
    return quickest
