"""The logic of the benchmark for accelerators, on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sp_compiler
from benchmarks import gpu, gpu_attention, gpu_regions, gpu_slices, region_times
from benchmarks.measure import PeakRecorder
from sp_compiler.cost.hardware import H100
from sp_compiler.ops.gpu import attention

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


def test_results_of_compiled_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU's are made by no operator that a recorder sees."""
    monkeypatch.setattr(
        attention,
        "_run",
        lambda *args: [torch._C._dynamo.guards._empty_strided_cpu((8,), (1,), torch.float32)],
    )
    given: Any = None, None, None
    found = []
    for context in (contextlib.nullcontext, gpu.kernels_shown):
        with PeakRecorder() as recorder, context():
            result = attention._run(*given)
        assert result
        found.append(recorder.alive_bytes(excluding=[]))
    assert found == [0, 32]


def test_pinned_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_pinned in (False, True):
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, value=is_pinned: value)
        with PeakRecorder() as recorder:
            x = torch.ones(8)
        found.append(recorder.alive_bytes(excluding=[]))
        assert x.sum() == 8
    assert found == [32, 0]


@pytest.mark.slow
def test_a_device_has_the_numbers_and_masks_of_the_cpu() -> None:
    (row,) = gpu.numbers("cpu", gpu.SMALL)
    assert dataclasses.astuple(row) == ("nanogpt", 0.0, 0.0)


@pytest.mark.slow
def test_every_contender_of_a_slice_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slices, "RECOMPUTES", ("none",))
    monkeypatch.setattr(gpu_slices, "DROPOUTS", (gpu_slices.DROPOUT,))
    # The small ones of two papers' models differ in the batch alone.
    first, _ = gpu_slices._layers(small=True)
    monkeypatch.setattr(gpu_slices, "_layers", lambda small: iter([first]))
    steps = gpu_slices._llama_steps
    # Inductor's C++ takes most of the time, and GPT has it too.
    monkeypatch.setattr(
        gpu_slices,
        "_llama_steps",
        lambda device, small: {
            key: step
            for key, step in steps(device, small=small).items()
            if key[0] != gpu_slices.PRODUCT_INDUCTOR
        },
    )
    rows = list(gpu_slices.slices("cpu", small=True, rounds=1))
    contenders = [row.contender for row in rows]
    # The layers of Llama-3-70B have no hand-written peer.
    assert len(rows) == 5 + 2
    assert contenders.count(gpu_slices.BY_HAND) == 1
    assert contenders.count(gpu_slices.BY_HAND_FUSED) == 1
    assert contenders.count(gpu_slices.PRODUCT_INDUCTOR) == 1
    assert all(0 < row.forward_ms < row.step_ms for row in rows)
    assert all(row.step_ms == row.forward_ms + row.backward_ms for row in rows)
    assert {row.ratio for row in rows if row.contender == gpu_slices.BY_HAND} == {1.0}
    assert {row.over_none for row in rows} == {1.0}


@pytest.mark.slow
def test_attention_is_timed_with_dropout_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "WIDTHS", (64,))
    rows = list(gpu_attention.attention("cpu", small=True, rounds=1))
    # The others need a GPU.
    assert [(row.dropout, row.contender) for row in rows] == [
        (0.0, gpu_attention.ONE),
        (0.1, gpu_attention.ONE),
    ]
    assert all(row.forward_ms > 0 and row.backward_ms > 0 for row in rows)


@pytest.mark.slow
def test_every_function_of_a_region_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_regions, "DROPOUT", {"GPT": 0.1})
    monkeypatch.setattr(region_times, "BACKENDS", ("eager",))
    monkeypatch.setattr(sp_compiler, "profile", lambda device: H100)
    rows = list(gpu_regions.regions("cpu", small=True, rounds=1))
    assert {(row.region, row.direction) for row in rows} == set(
        itertools.product(("Prologue", "Block", "Epilogue"), ("forward", "backward"))
    )
    assert all(row.estimate == row.planned_ms / row.measured_ms > 0 for row in rows)


@pytest.mark.slow
def test_a_trace_has_the_longest_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    rows = list(gpu_slices.trace("cpu", small=True, path=path))
    assert [row.ms for row in rows] == sorted((row.ms for row in rows), reverse=True)
    assert 0.5 < sum(row.part for row in rows) <= 1
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_page_is_of_the_kept_results() -> None:
    assert gpu.PAGE.read_text() == gpu.page(json.loads(gpu.FILE.read_text()))
