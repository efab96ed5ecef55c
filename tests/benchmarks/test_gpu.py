"""The logic of the benchmark for accelerators, on the CPU."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import gpu

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MODELS", ("nanogpt",))  # the others take as long each


@pytest.mark.slow
def test_memory_is_planned_to_the_byte() -> None:
    (row,) = gpu.memory("cpu", gpu.SMALL)
    assert row.kept_recorded == row.kept_planned > 0
    assert row.peak_recorded == row.peak_planned > row.kept_planned
    assert row.peak_with_gradients > row.peak_recorded
    assert row.peak_allocated is None


@pytest.mark.slow
def test_a_device_has_the_numbers_and_masks_of_the_cpu() -> None:
    (row,) = gpu.numbers("cpu", gpu.SMALL)
    assert dataclasses.astuple(row) == ("nanogpt", 0.0, 0.0)


@pytest.mark.slow
def test_every_contender_of_a_slice_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RECOMPUTES", ("selective",))
    # The small ones of two papers' models differ in the batch alone.
    first, _ = gpu._layers(small=True)
    monkeypatch.setattr(gpu, "_layers", lambda small: iter([first]))
    rows = list(gpu.slices("cpu", small=True, rounds=1))
    contenders = [row.contender for row in rows]
    # Dropout on and off; the layer of Llama-3-70B has no hand-written peer.
    assert len(rows) == 2 * 3 + 2
    assert contenders.count("Megatron style TP+SP") == 2
    assert all(row.step_ms > 0 for row in rows)
    assert {row.ratio for row in rows if row.contender == gpu.PRODUCT} == {1.0}
