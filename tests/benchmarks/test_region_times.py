"""What is timed of a region's code."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.region_times import CPU_TIME, _Timed


def test_each_direction_is_timed_and_nothing_else() -> None:
    """The backward of a loss is a backward."""
    code = SimpleNamespace(
        forward=lambda tp, x: x + 1, loss_backward=lambda tp, x: x - 1, recompute=lambda tp: 3
    )
    moments: dict[str, list[tuple[float, float]]] = {}
    timed = _Timed(code, moments, CPU_TIME)
    assert (timed.forward(None, 1), timed.loss_backward(None, 1), timed.recompute(None)) == (
        2,
        0,
        3,
    )
    assert {direction: len(found) for direction, found in moments.items()} == {
        "forward": 1,
        "backward": 1,
    }
