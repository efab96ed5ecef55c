"""Where a chain of calls is cut, against all cuts that there are."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sp_compiler import ArgumentError
from sp_compiler.pipeline_parallel.cutting import Rest, ends_of, gathered_adamw_bytes
from sp_compiler.pipeline_parallel.microbatch_recompute import Places, with_places
from sp_compiler.pipeline_parallel.schedules import SCHEDULES, most_in_flight
from sp_compiler.pipeline_parallel.stage_memory import RankActivations, StageMemory
from sp_compiler.planning.call_memory import CallMemory
from sp_compiler.planning.data import CallPlan, ParameterSize


def _layers(count: int) -> tuple[list[CallPlan], dict[str, ParameterSize]]:
    def call(name: str, path: str, step_us: float) -> CallPlan:
        memory = CallMemory(1, 1)
        return CallPlan("Block", path, (name,), ((hash(name), 10),), memory, step_us, step_us / 3)

    calls = [call(f"w{i}", f"h.{i}", 1.0) for i in range(count)]
    calls = [call("e", "", 0.5), *calls, call("e", "", 2.0)]
    return calls, {name: ParameterSize(10, 30, True) for call in calls for name in call.parameters}


def test_embeddings_and_head_count() -> None:
    calls, sizes = _layers(8)
    assert ends_of(calls, sizes, [4, 3, 2, 1], None) == [3, 5, 8, 10]


def test_memory_moves_the_cut() -> None:
    """A parameter of 10 elements takes 120 bytes; each layer keeps 10 per microbatch in flight."""
    calls, sizes = _layers(4)
    assert ends_of(calls, sizes, [2, 1], None) == [4, 6]
    assert ends_of(calls, sizes, [20, 1], 800) == [2, 6]
    with pytest.raises(ArgumentError, match=r"within 500 B; .* that fits is 641 B"):
        ends_of(calls, sizes, [20, 1], 500)
    # Gathered of 4 ranks: 30 bytes of values, 30 of gradients and a quarter of the 120.
    gathered = partial(gathered_adamw_bytes, num_shards=4)
    with pytest.raises(ArgumentError, match=r"that fits is 501 B"):
        ends_of(calls, sizes, [20, 1], 500, gathered)
    with pytest.raises(ArgumentError, match="4 layers, too few for 5 pipeline stages"):
        ends_of(calls, sizes, [1] * 5, None)


def test_every_stage_has_a_parameter() -> None:
    """An optimizer takes no empty list: the slow layer without weights is no stage of its own."""
    calls, sizes = _layers(3)
    slow = replace(calls[3], parameters=(), step_us=9.0)
    head = replace(calls[4], parameters=())
    assert ends_of([*calls[:4], head], sizes, [1, 1], None) == [3, 5]
    assert ends_of([*calls[:3], slow, head], sizes, [1, 1], None) == [2, 5]


_MIXED_CALLS = st.lists(
    # Time, time with recomputation, bytes kept, bytes kept then.
    st.tuples(*(st.integers(low, 9) for low in (1, 0, 1, 0))),
    min_size=2,
    max_size=7,
)


@settings(max_examples=40, deadline=None)
@given(_MIXED_CALLS, st.integers(1, 4), st.integers(300, 800), st.sampled_from(("1f1b", "gpipe")))
def test_the_cut_of_stages_that_mix_is_the_best_of_all(
    drawn: list[tuple[int, int, int, int]], num_stages: int, room: int, schedule: str
) -> None:
    """Every cut, each stage by its own simulated order."""
    assume(len(drawn) >= num_stages)

    def calls_of(time: int, kept: int) -> list[CallPlan]:
        return [
            CallPlan(
                "Block", f"h.{i}", (f"w{i}",), ((i, 5 * each[kept]),), CallMemory(9, 9 * kept),
                float(each[time]), 0.0,
            )
            for i, each in enumerate(drawn)
        ]  # fmt: skip

    most, rest = calls_of(0, 2), calls_of(1, 3)
    sizes = {f"w{i}": ParameterSize(10, 30, True) for i in range(len(drawn))}
    orders = SCHEDULES[schedule].orders(num_stages, 1, 6)

    def mean_us(stage: int, start: int, stop: int) -> float:
        memories = [StageMemory.of(calls[start:stop]) for calls in (most, rest)]
        most_us, rest_us = (sum(c.step_us for c in calls[start:stop]) for calls in (most, rest))
        for places in range(6, -1, -1):
            chosen = with_places(orders[stage], places)
            took = RankActivations.of(
                orders[stage],
                lambda action: memories[action.microbatch not in chosen],  # noqa: B023
            )
            if 120 * (stop - start) + took.peak_bytes <= room:
                return (len(chosen) * most_us + (6 - len(chosen)) * rest_us) / 6
        return math.inf

    def cost(ends: list[int]) -> tuple[float, float]:
        parts = enumerate(itertools.pairwise([0, *ends]))
        took = [mean_us(stage, *part) for stage, part in parts]
        return max(took), sum(time**2 for time in took)

    every = [
        [*inner, len(drawn)]
        for inner in itertools.combinations(range(1, len(drawn)), num_stages - 1)
    ]
    best = min(map(cost, every))
    in_flight = most_in_flight(orders, num_stages)
    mixed = Rest(rest, Places.of(orders, num_stages))
    if best[0] == math.inf:
        with pytest.raises(ArgumentError, match="no cut into"):
            ends_of(most, sizes, in_flight, room, rest=mixed)
    else:
        assert cost(ends_of(most, sizes, in_flight, room, rest=mixed)) == pytest.approx(best)


def test_recomputation_moves_the_cut() -> None:
    """The first of two stages has room for one of two microbatches with all that it could keep."""
    most, sizes = _layers(6)
    rest = [replace(call, kept=((call.kept[0][0], 1),), step_us=4 * call.step_us) for call in most]
    orders = SCHEDULES["1f1b"].orders(2, 1, 8)
    mixed = Rest(rest, Places.of(orders, 2))
    # 480 bytes of state for three layers and the embedding; 80 bytes of activations.
    assert ends_of(most, sizes, [2, 1], None) == [5, 8]
    assert ends_of(rest, sizes, [2, 1], 680) == [5, 8]
    assert ends_of(most, sizes, [2, 1], 680, rest=mixed) == [4, 8]
    with pytest.raises(ArgumentError, match=r"within 480 B; .* that fits is 489 B"):
        ends_of(most, sizes, [2, 1], 480, rest=mixed)
