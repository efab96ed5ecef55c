"""Cuts of a chain into stages, against all cuts that there are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compiler.solve.pipeline_cut import fastest_cut, least_largest

TIMES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8)


def _all_cuts(num_calls: int, num_stages: int) -> list[list[int]]:
    inner = itertools.combinations(range(1, num_calls), num_stages - 1)
    return [[*ends, num_calls] for ends in inner]


def _parts(ends: list[int]) -> list[tuple[int, int, int]]:
    return [(stage, start, end) for stage, (start, end) in enumerate(zip([0, *ends], ends))]  # noqa: B905


@settings(max_examples=150, deadline=None)
@given(TIMES, st.integers(1, 5), st.integers(1, 30), st.data())
def test_as_good_as_the_best_of_all(
    times: list[float], num_stages: int, room: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(times), max_size=len(times)))

    def limits(stage: int, start: int, stop: int) -> float:
        # The first stages have most in flight.
        needed = sum(sizes[start:stop]) * (num_stages - stage)
        return 0.0 if needed <= room else math.inf

    def cost(ends: list[int]) -> tuple[float, float]:
        took = [sum(times[start:stop]) for _, start, stop in _parts(ends)]
        return max(took), sum(time**2 for time in took)

    fitting = [
        ends
        for ends in _all_cuts(len(times), num_stages)
        if all(limits(*part) == 0 for part in _parts(ends))
    ]
    found = fastest_cut(times, num_stages, limits)
    if not fitting:
        assert found is None
        return
    assert found in fitting
    assert cost(found) == pytest.approx(min(map(cost, fitting)))


@settings(max_examples=150, deadline=None)
@given(TIMES, st.integers(1, 4), st.data())
def test_time_that_stages_add(times: list[float], num_stages: int, data: st.DataObject) -> None:
    """Each stage its own: what it recomputes to have room, or that it has none."""
    drawn = st.one_of(st.integers(0, 40).map(float), st.just(math.inf))
    parts = [
        (stage, start, stop)
        for stage in range(num_stages)
        for start, stop in itertools.combinations(range(len(times) + 1), 2)
    ]
    values = data.draw(st.lists(drawn, min_size=len(parts), max_size=len(parts)))
    added = dict(zip(parts, values, strict=True))

    def cost(ends: list[int]) -> tuple[float, float]:
        took = [sum(times[part[1] : part[2]]) + added[part] for part in _parts(ends)]
        return max(took), sum(time**2 for time in took)

    best = min(map(cost, _all_cuts(len(times), num_stages)), default=(math.inf, math.inf))
    found = fastest_cut(times, num_stages, lambda *part: added[part])
    if best[0] == math.inf:
        assert found is None
    else:
        assert found is not None
        assert cost(found) == pytest.approx(best)


@settings(max_examples=50, deadline=None)
@given(TIMES, st.integers(1, 5))
def test_least_largest(sizes: list[float], num_stages: int) -> None:
    def size(stage: int, start: int, stop: int) -> float:
        return sum(sizes[start:stop]) + stage

    largest = [
        max(size(*part) for part in _parts(ends)) for ends in _all_cuts(len(sizes), num_stages)
    ]
    assert least_largest(len(sizes), num_stages, size) == min(largest, default=math.inf)
