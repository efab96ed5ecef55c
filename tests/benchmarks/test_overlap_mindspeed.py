"""The orders of MindSpeed's pipeline, as its own schedule runs them."""

from __future__ import annotations

import pytest

from benchmarks.overlap_mindspeed import (
    PER_RANK,
    PIPELINE,
    RECOMPUTATION,
    in_advance,
    in_bubble,
    orders,
)
from sp_compiler.pipeline_parallel.schedules import FORWARD, FULL_BACKWARD, Action

_LETTERS = {FORWARD: "F", RECOMPUTATION: "R", FULL_BACKWARD: "B"}


def _text(order: list[Action]) -> str:
    return " ".join(f"{_LETTERS[each.kind]}{each.stage}.{each.microbatch}" for each in order)


def test_recomputations_in_bubbles() -> None:
    assert "F4.10 R0.4 B0.4 F4.11 R0.5 B0.5 F0.12 R0.6 B0.6 F0.13 B0.7" in _text(in_bubble(0))
    assert _text(in_bubble(0)).endswith(
        "R0.9 B0.9 R0.10 B0.10 R0.11 B0.11 R0.15 B4.12 B4.13 B4.14 B4.15 B0.12 B0.13 B0.14 B0.15"
    )
    assert _text(in_bubble(1)).endswith(
        "F5.15 R1.11 B1.11 R1.15 B5.12 B5.13 B5.14 B5.15 B1.12 B1.13 B1.14 B1.15"
    )
    for rank in (2, 3):
        assert in_bubble(rank) == orders()[rank]


@pytest.mark.parametrize("rank", range(PIPELINE))
def test_no_rank_keeps_more_whole_microbatches_than_there_are_stages(rank: int) -> None:
    order = in_bubble(rank)
    again = {(each.stage, each.microbatch) for each in order if each.kind is RECOMPUTATION}
    whole: set[tuple[int, int]] = set()
    for each in order:
        of = (each.stage, each.microbatch)
        if each.kind is RECOMPUTATION or (each.kind is FORWARD and of not in again):
            whole.add(of)
        elif each.kind is FULL_BACKWARD:
            whole.remove(of)
        assert len(whole) <= PIPELINE * PER_RANK
    assert not whole


def test_recomputations_in_advance() -> None:
    for rank in range(PIPELINE):
        order = in_advance(rank)
        assert [each for each in order if each.kind is not RECOMPUTATION] == orders()[rank]
        for place, each in enumerate(order):
            if each.kind is FULL_BACKWARD:
                assert order[place - 1] == each._replace(kind=RECOMPUTATION)
