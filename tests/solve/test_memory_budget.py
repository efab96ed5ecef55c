"""The split of every call, against brute force over all assignments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compiler.base.storage import Storage
from sp_compiler.solve.memory_budget import (
    CallSplits,
    Sent,
    Shared,
    Split,
    cheapest,
    peak_bytes,
    smallest,
)


@st.composite
def _steps(draw: st.DrawFn) -> list[CallSplits]:
    rng = draw(st.randoms(use_true_random=False))
    calls = range(rng.randint(1, 5))
    results = [
        Storage(("forward", i, f"out{k}"), rng.choice([5, 10, 30])) for i in calls for k in (0, 1)
    ]

    def some(index: int, most: int) -> frozenset[Storage]:
        there = [storage for storage in results if storage.owner[1] <= index]
        return frozenset(rng.sample(there, rng.randint(0, min(most, len(there)))))

    return [
        CallSplits(
            tuple(
                Split(
                    rng.choice([0.0, 1.0, 2.0, 5.0, 5.0]),
                    rng.choice([0, 3, 7, 20]),
                    some(index, 2),
                    rng.randint(0, 30),
                    rng.randint(0, 30),
                    rng.choice([Sent(), Sent(4), Sent(9, some(index, 1))]),
                )
                for _ in range(rng.randint(1, 4))
            ),
            frozenset({some(index, 3)}),
            frozenset({some(index, 3), some(index, 3)}),
            frozenset({some(index, 3)} if rng.random() < 0.7 else ()),
            frozenset({some(index, 3)} if rng.random() < 0.7 else ()),
        )
        for index in calls
    ]


def _us(calls: Sequence[CallSplits], picks: Sequence[int]) -> float:
    return sum(call.splits[pick].time_us for call, pick in zip(calls, picks, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_steps())
def test_assignments_are_those_of_brute_force(calls: list[CallSplits]) -> None:
    every = [
        (_us(calls, picks), peak_bytes(calls, picks))
        for picks in itertools.product(*(range(len(call.splits)) for call in calls))
    ]
    assert peak_bytes(calls, smallest(calls)) == min(peak for _, peak in every)
    for limit in range(20, 200, 15):
        best = min((each for each in every if each[1] <= limit), default=None)
        picks = cheapest(calls, limit)
        assert (picks and (_us(calls, picks), peak_bytes(calls, picks))) == best


def test_what_is_sent_lives_through_the_next_call() -> None:
    """10 bytes each of three calls: at most 20 at once, where 30 would be kept."""
    none = frozenset({Shared()})

    def call(*splits: Split) -> CallSplits:
        return CallSplits(splits, none, none, none, none)

    kept = Split(1.0, 10, Shared(), 2, 3)
    sent = Split(1.5, 0, Shared(), 2, 3, Sent(10))
    calls = [
        call(kept, sent),
        call(kept, sent),
        call(kept, sent),
        call(Split(1.0, 0, Shared(), 1, 1)),
    ]
    assert peak_bytes(calls, [0, 0, 0, 0]) == 33
    assert peak_bytes(calls, [1, 1, 1, 0]) == 23
    # The last but one is on the device from its forward to its backward in any case.
    assert cheapest(calls, 23) == [1, 0, 0, 0]
    assert cheapest(calls, 22) is None
    assert cheapest(calls, 40) == [0, 0, 0, 0]
