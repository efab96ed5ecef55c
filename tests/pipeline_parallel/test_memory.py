"""The peak of every stage, measured on running processes, is the planned one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from benchmarks.measure import PeakRecorder
from sp_compiler.pipeline_parallel.schedules import BACKWARD_INPUTS as I
from sp_compiler.pipeline_parallel.schedules import BACKWARD_WEIGHTS as W
from sp_compiler.pipeline_parallel.schedules import FORWARD as F
from sp_compiler.pipeline_parallel.schedules import FULL_BACKWARD as B
from sp_compiler.pipeline_parallel.schedules import Action
from sp_compiler.pipeline_parallel.stage_memory import RankActivations, StageMemory
from sp_compiler.planning.call_memory import CallMemory
from sp_compiler.planning.data import CallPlan
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

MICROBATCHES = 4


def _call(kept: tuple[tuple[int, int], ...], memory: CallMemory) -> CallPlan:
    return CallPlan("Block", "h.0", ("w",), kept, memory, 3.0, 1.0)


def test_a_stage_of_two_calls() -> None:
    """They share a mask of 7; beside it they keep 10 and 20."""
    calls = [
        _call(((0, 7), (1, 10)), CallMemory(30, 50, 4)),
        _call(((0, 7), (2, 20)), CallMemory(40, 60, 5)),
    ]
    found = StageMemory.of(calls)
    assert found.kept_bytes == 7 + 10 + 20
    assert found.peak_bytes[F] == 7 + 10 + 40
    # With the gradient of 5 that came from the next stage, which the second call's own bytes have.
    assert found.peak_bytes[B] == max(37 + 60, 17 + 5 + 50)
    order = [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)]
    assert RankActivations.of(order, [found]) == RankActivations(2, 2 * 37, 37 + 97)


def test_a_backward_in_two() -> None:
    calls = [
        _call(((1, 10),), CallMemory(30, 50, 0, inputs_bytes=20, weights_bytes=6, handed_bytes=12)),
        _call(((2, 20),), CallMemory(40, 60, 0, inputs_bytes=30, weights_bytes=9, handed_bytes=13)),
    ]
    found = StageMemory.of(calls)
    assert found.peak_bytes[I] == max(30 + 30, 10 + 13 + 20)
    assert found.peak_bytes[W] == max(12 + 13 + 9, 12 + 6)
    order = [Action(F, 0, 0), Action(I, 0, 0), Action(F, 0, 1), Action(I, 0, 1)]
    # The second backward for inputs runs while what the first one handed over still waits.
    assert RankActivations.of(order, [found]) == RankActivations(2, 30 + 25, 25 + 60)


def _peaks(cases: Sequence[tuple[str, int, str, str]]) -> list[tuple[int, int]]:
    """Measured and planned bytes of this rank in the second step, when gradients exist."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = []
    for name, layers, schedule, recompute in cases:
        batch = zoo.inputs(name, batch=2 * MICROBATCHES, seq=64)
        settings: dict[str, Any] = {
            "microbatches": MICROBATCHES,
            "schedule": schedule,
            "recompute": recompute,
        }
        model = zoo.build(name, layers=layers)
        first = {key: value[:2] for key, value in batch.items()}
        plan = sp_compiler.plan(model, ((), first), mesh="pp=2", **settings)
        pipeline = sp_compiler.pipeline(model, mesh=mesh, example_inputs=((), batch), **settings)
        pipeline.step(**batch)
        with PeakRecorder() as recorder:
            pipeline.step(**batch)
        parameters = list(pipeline.parameters())
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        outside = [*parameters, *grads, *pipeline.module.buffers(), *batch.values()]
        stage = plan.stages[dist.get_rank()]
        planned = stage.activation_bytes + stage.working_bytes
        found.append((recorder.peak_bytes(excluding=outside), planned))
    return found


@pytest.mark.slow
def test_running_stages_take_the_planned_memory() -> None:
    """GPipe with full recomputation keeps little of its own: it would show each thing left over."""
    cases = [
        ("plain", 4, "gpipe", "full"),
        ("llama", 4, "zero_bubble", "selective"),
        ("llama", 8, "dualpipev", "selective"),  # stages that outweigh messages on their way
    ]
    for results in run_on_ranks(2, _peaks, cases):
        for case, (measured, planned) in zip(cases, results, strict=True):
            assert abs(measured - planned) <= 0.03 * planned, (case, measured, planned)
