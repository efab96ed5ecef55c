"""Longest common and longest increasing subsequences."""

from __future__ import annotations

import bisect


def longest_common(old: list[str], new: list[str]) -> list[tuple[int, int]]:
    """Return index pairs of the longest common subsequence, the earliest if there are several."""
    # The table's size is the product of both lengths, and most sequences have a common prefix.
    start = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), None)
    if start is None:
        start = min(len(old), len(new))
    if start:
        rest = longest_common(old[start:], new[start:])
        return [(i, i) for i in range(start)] + [(i + start, j + start) for i, j in rest]
    lengths = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for first in reversed(range(len(old))):
        row, below = lengths[first], lengths[first + 1]
        for second in reversed(range(len(new))):
            if old[first] == new[second]:
                row[second] = below[second + 1] + 1
            else:
                row[second] = max(below[second], row[second + 1])
    pairs = []
    first = second = 0
    while first < len(old) and second < len(new):
        if old[first] == new[second]:
            pairs.append((first, second))
            first, second = first + 1, second + 1
        elif lengths[first + 1][second] >= lengths[first][second + 1]:
            first += 1
        else:
            second += 1
    return pairs


def longest_increasing(values: list[int]) -> set[int]:
    """Indices of one longest increasing subsequence of distinct ``values`` (patience sorting)."""
    tops: list[int] = []
    tails: list[int] = []
    before: dict[int, int | None] = {}
    for index, value in enumerate(values):
        pile = bisect.bisect_left(tops, value)
        before[index] = tails[pile - 1] if pile else None
        tops[pile : pile + 1] = [value]
        tails[pile : pile + 1] = [index]
    kept = set()
    last = tails[-1] if tails else None
    while last is not None:
        kept.add(last)
        last = before[last]
    return kept
