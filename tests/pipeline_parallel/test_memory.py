"""The peak of every stage, measured on running processes, is the planned one."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from benchmarks.measure import PeakRecorder
from sp_compiler import GridPlan
from sp_compiler.pipeline_parallel.microbatch_recompute import Places, with_places
from sp_compiler.pipeline_parallel.schedules import BACKWARD_INPUTS as I
from sp_compiler.pipeline_parallel.schedules import BACKWARD_WEIGHTS as W
from sp_compiler.pipeline_parallel.schedules import FORWARD as F
from sp_compiler.pipeline_parallel.schedules import FULL_BACKWARD as B
from sp_compiler.pipeline_parallel.schedules import SCHEDULES, Action
from sp_compiler.pipeline_parallel.stage_memory import RankActivations, StageMemory
from sp_compiler.planning.call_memory import CallMemory
from sp_compiler.planning.data import CallPlan
from tests.helpers.ranks import run_on_copies
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.helpers.torch_versions import NEEDS_V_SCHEDULES
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
    assert RankActivations.of(order, lambda _: found) == RankActivations(2, 2 * 37, 37 + 97)


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
    assert RankActivations.of(order, lambda _: found) == RankActivations(2, 30 + 25, 25 + 60)


def _order(in_flight: int, count: int) -> list[Action]:
    order = [Action(F, 0, number) for number in range(in_flight)]
    for number in range(count):
        order.append(Action(B, 0, number))
        if number + in_flight < count:
            order.append(Action(F, 0, number + in_flight))
    return order


def test_microbatches_take_the_places_that_are_free() -> None:
    assert with_places(_order(4, 8), 0) == set()
    # 0 and 1 first; 4 and 5 begin behind their backwards.
    assert with_places(_order(4, 8), 2) == {0, 1, 4, 5}
    assert with_places(_order(4, 8), 4) == with_places(_order(4, 8), 9) == set(range(8))


def _simulated_peak(
    order: Sequence[Action], most: StageMemory, rest: StageMemory, chosen: frozenset[int]
) -> int:
    return RankActivations.of(
        order, lambda action: most if action.microbatch in chosen else rest
    ).peak_bytes


@pytest.mark.parametrize("room", [0, 109, 110, 159, 160, 199, 200, 209, 210])
def test_as_many_places_as_fit(room: int) -> None:
    most = StageMemory.of([_call(((1, 60),), CallMemory(60, 20))])
    rest = StageMemory.of([_call(((1, 10),), CallMemory(60, 80))])
    order = _order(3, 6)
    peaks = [_simulated_peak(order, most, rest, with_places(order, places)) for places in range(4)]
    # Without recomputing, three take less than two and one that is recomputed.
    assert peaks == [110, 160, 210, 200]
    places = Places(order)
    assert [*places.peaks_bytes(most, rest)] == peaks[::-1]
    fitting = [number for number in range(4) if peaks[number] <= room]
    expected = with_places(order, max(fitting)) if fitting else None
    assert places.most_that_fit(most, rest, room) == expected


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        pytest.param("dualpipev", 2, marks=NEEDS_V_SCHEDULES),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_peaks_of_places_are_those_of_the_simulated_order(
    schedule: str, per_rank: int, seed: int
) -> None:
    generator = random.Random(seed)

    def drawn() -> StageMemory:
        kept, handed, *peaks = (generator.randrange(100) for _ in range(6))
        kinds = (F, B, I, W)
        return StageMemory(kept, handed, dict(zip(kinds, peaks, strict=True)))

    orders = SCHEDULES[schedule].orders(4, per_rank, 12)
    most_of, rest_of = drawn(), drawn()
    for stage, places in enumerate(Places.of(orders, 4 * per_rank)):
        order = [action for rank in orders for action in rank if action.stage == stage]
        assert places.num_microbatches == 12
        # More places than microbatches change nothing.
        choices = dict.fromkeys(with_places(order, number) for number in range(13))
        expected = [_simulated_peak(order, most_of, rest_of, chosen) for chosen in choices]
        assert [*places.peaks_bytes(most_of, rest_of)] == expected[::-1]


_Cases = Sequence[tuple[str, int, str, str]]
# The model of two policies.
_MIXED = "llama", 4


@functools.cache
def _planned(name: str, layers: int, **settings: Any) -> GridPlan:
    return sp_compiler.plan(
        zoo.build(name, layers=layers),
        ((), zoo.inputs(name, batch=2, seq=64)),
        mesh="pp=2",
        microbatches=MICROBATCHES,
        **settings,
    )


@functools.cache
def _mixed_settings() -> dict[str, Any]:
    # A byte less than the first stage needs for two microbatches. All is in float64: a parameter,
    # its gradient and two moments.
    alone = _planned(*_MIXED, recompute="none", bytes_per_parameter=32)
    memory = alone.stages[0].total_bytes - 1
    return {"recompute": "none", "recompute_rest": "full", "memory": memory}


def _compile(cases: _Cases) -> None:
    """Plans, and programs."""
    _planned(*_MIXED, **_mixed_settings(), bytes_per_parameter=32)
    with shared_programs():
        for name, layers, schedule, recompute in cases:
            _planned(name, layers, schedule=schedule, recompute=recompute)
            model, micro = zoo.build(name, layers=layers), zoo.inputs(name, batch=2, seq=64)
            compile_for_ranks(model, micro, schedule=schedule, recompute=recompute)
        name, layers = _MIXED
        mixed: dict[str, Any] = {"recompute_rest": "full"}
        for rest in ({}, mixed):
            model, micro = zoo.build(name, layers=layers), zoo.inputs(name, batch=2, seq=64)
            compile_for_ranks(model, micro, schedule="1f1b", recompute="none", **rest)


def _peaks(cases: _Cases) -> list[tuple[int, int]]:
    """Measured and planned bytes of this rank in the second step, when gradients exist."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = []
    for name, layers, schedule, recompute in cases:
        batch = zoo.inputs(name, batch=2 * MICROBATCHES, seq=64)
        settings: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
        plan, model = _planned(name, layers, **settings), zoo.build(name, layers=layers)
        settings["microbatches"] = MICROBATCHES
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


def _mixed() -> tuple[bool, int, int, tuple[int, ...], tuple[int, ...]]:
    """Return if gradients equal to the bit; measured, planned bytes; saving microbatches."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = dist.get_rank()
    name, layers = _MIXED
    batch = zoo.inputs(name, batch=2 * MICROBATCHES, seq=64)
    mixed = _mixed_settings()
    stage = _planned(*_MIXED, **mixed, bytes_per_parameter=32).stages[rank]
    gradients: list[dict[str, Any]] = []
    for settings in ({"recompute": "none"}, mixed):
        pipeline = sp_compiler.pipeline(
            zoo.build(name, layers=layers),
            mesh=mesh,
            example_inputs=((), batch),
            microbatches=MICROBATCHES,
            **settings,
        )
        pipeline.step(**batch)
        gradients.append({n: p.grad.clone() for n, p in pipeline.named_parameters()})
    with PeakRecorder() as recorder:
        pipeline.step(**batch)
    parameters = list(pipeline.parameters())
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients_before = [grad for each in gradients for grad in each.values()]
    outside = [*parameters, *grads, *pipeline.module.buffers(), *batch.values(), *gradients_before]
    (runner,) = pipeline._runners.values()
    saving = tuple(len(module._stage.saving) for module in runner._local)
    equal = all(torch.equal(gradients[0][name], grad) for name, grad in gradients[1].items())
    planned = stage.activation_bytes + stage.working_bytes
    return equal, recorder.peak_bytes(excluding=outside), planned, saving, stage.saving


def _measured(cases: _Cases) -> tuple[Any, Any]:
    with shared_programs(only_known=True):
        return _peaks(cases), _mixed()


@pytest.mark.slow
def test_running_stages_take_the_planned_memory() -> None:
    """GPipe with full recomputation keeps little of its own: it would show each thing left over."""
    cases = [
        ("plain", 4, "gpipe", "full"),
        ("llama", 4, "zero_bubble", "selective"),
        ("llama", 8, "dualpipev", "selective"),  # stages that outweigh messages on their way
    ]
    ranks = run_on_copies(2, functools.partial(_compile, cases), _measured, cases)
    for rank, (results, mixed) in enumerate(ranks):
        for case, (measured, planned) in zip(cases, results, strict=True):
            assert abs(measured - planned) <= 0.03 * planned, (case, measured, planned)
        equal, measured, planned, saving, planned_saving = mixed
        assert equal
        assert saving == planned_saving == ((2,) if rank == 0 else (MICROBATCHES,))
        assert abs(measured - planned) <= 0.03 * planned, (measured, planned)
