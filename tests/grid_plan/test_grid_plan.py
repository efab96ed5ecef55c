"""A step on a grid: memory of every stage, traffic by axis, time."""

from __future__ import annotations

import contextlib
import itertools
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler import GridPlan, Plan
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.compiler import build
from sp_compiler.cost.hardware import H100
from sp_compiler.grid_plan.build import grid_plan
from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.options import GridOptions
from sp_compiler.grid_plan.sizes import GridSizes, link_of
from sp_compiler.grid_plan.stage_plan import held_bytes
from sp_compiler.grid_plan.suggest import _Setting
from sp_compiler.grid_plan.timetable import StageTimes, finish_us
from sp_compiler.options import CompileOptions
from sp_compiler.pipeline_parallel.cutting import NoCutError
from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    FORWARD,
    FULL_BACKWARD,
    SCHEDULES,
    schedule_of,
)
from sp_compiler.planning.call_memory import CallMemory
from sp_compiler.planning.data import BlockPlan, CallPlan, ParameterSize, Work
from tests.helpers.torch_versions import NEEDS_V_SCHEDULES


def _calls(layers: int) -> list[CallPlan]:
    """Layers that keep 10 bytes each and share a mask of 7; embedding and head share a weight."""

    def layer(number: int) -> CallPlan:
        kept = ((0, 7), (number + 1, 10))
        return CallPlan(
            "Block", f"blocks.{number}", (f"w{number}",), kept, CallMemory(3, 3), 3.0, 1.0
        )

    first = CallPlan("Block", "", ("embedding",), ((0, 7),), CallMemory(1, 1), 0.0, 0.0)
    memory = CallMemory(50, 50)
    last = CallPlan("Block", "", ("norm", "embedding"), ((1000, 40),), memory, 0.0, 0.0)
    return [first, *map(layer, range(layers)), last]


def _sizes(layers: int) -> dict[str, ParameterSize]:
    of_layers = {f"w{number}": ParameterSize(100, 200, True) for number in range(layers)}
    others = {"embedding": ParameterSize(1000, 2000, True), "norm": ParameterSize(8, 16, False)}
    return {**of_layers, **others}


def _of(
    layers: int,
    grid: GridSizes,
    microbatches: int,
    calls: Any = None,
    rest_calls: Any = (),
    **options: Any,
) -> GridPlan:
    """A plan of layers that send 1000 bytes to each other."""
    calls = _calls(layers) if calls is None else calls
    whole, chain = _program(layers, grid, calls, rest_calls, **options)
    return grid_plan(whole, chain, GridOptions(grid, microbatches, **options))


def _program(
    layers: int, grid: GridSizes, calls: Any, rest_calls: Any = (), **options: Any
) -> tuple[Plan, Chain]:
    block = BlockPlan("Block", ("",), (), (), (), Work(model_flops=10), 1.0)
    parameters = _sizes(layers)
    whole = Plan(
        model_name="Model",
        tp=grid.tp,
        options={"recompute": "none", "recompute_rest": options.get("recompute_rest")},
        hardware=H100,
        parameter_bytes=0,
        replicated_parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        activation_bytes=0,
        activation_peak_bytes=0,
        accumulation_bytes=0,
        returned_bytes=0,
        blocks=(block,),
        gradient_reduction=(),
        work=block.work,
    )
    sent = [1000] * len(calls)
    rest = replace(whole, options={"recompute": "full"}) if rest_calls else None
    return whole, Chain(calls, parameters, sent, sent, rest=rest, rest_calls=rest_calls)


def test_stages_of_1f1b() -> None:
    found = _of(8, GridSizes(pp=4), 16, gpus_per_node=4)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.activation_bytes for stage in found.stages] == [4 * 27, 3 * 27, 2 * 27, 67]
    assert [stage.working_bytes for stage in found.stages] == [3, 3, 3, 50]
    assert found.stages[0].chunks == (("", "blocks.0", "blocks.1"),)
    assert found.stages[3].chunks == (("blocks.6", "blocks.7", ""),)


def test_microbatches_that_do_not_fit_recompute() -> None:
    """Layers that keep 10 bytes, or one and take longer; room for two that keep all of stage 0."""
    rest = [
        replace(call, kept=((call.kept[-1][0], 1),), step_us=call.step_us + 1)
        if call.path
        else call
        for call in _calls(8)
    ]
    state = 18 * (1000 + 200)
    memory = state + 2 * 27 + 2 * 9 + 3
    most, mixed, least = (
        _of(8, GridSizes(pp=4), 16, calls, rest_calls, **options)
        for calls, rest_calls, options in (
            (_calls(8), (), {}),
            (_calls(8), rest, {"memory": memory, "recompute_rest": "full"}),
            (rest, (), {}),
        )
    )
    first, *_, last = mixed.stages
    # Two of the four in flight at a time, and later ones in their places.
    assert first.saving == (8,)
    assert first.activation_bytes == 2 * 27 + 2 * 9
    assert first.total_bytes <= memory
    assert last.saving == (16,)
    assert most.step_us < mixed.step_us < least.step_us
    assert mixed.step_us == mixed.timeline.step_us
    assert first.backward_us == (most.stages[0].backward_us + least.stages[0].backward_us) / 2
    assert "runs with recompute=none, the others with full: 8; " in str(mixed)
    assert "the others" not in str(most)


@pytest.mark.parametrize(("pp", "chunks"), [(4, 1), (4, 2), (4, 3), (2, 6), (6, 2)])
def test_the_bubble_of_equal_stages_is_the_papers(pp: int, chunks: int) -> None:
    """(p - 1) / (v m), arXiv 2104.04473, sections 2.2.1 and 2.2.2."""
    name = "1f1b" if chunks == 1 else "interleaved"
    times = [StageTimes(1.0, 2.0)] * (pp * chunks)
    took = finish_us(SCHEDULES[name].orders(pp, chunks, 4 * pp), times)
    assert max(took) == 4 * pp * chunks * 3.0 * (1 + (pp - 1) / (chunks * 4 * pp))


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        "interleaved",
        "zero_bubble",
        pytest.param("dualpipev", marks=NEEDS_V_SCHEDULES),
    ],
)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_no_plan_is_below_the_bounds_by_which_a_search_skips_it(schedule: str, pp: int) -> None:
    """Of equal stages, whose messages take no time beside milliseconds of computation."""
    grid = GridSizes(pp=pp)
    calls = [
        replace(call, step_us=3e3 * bool(call.path), forward_us=1e3 * bool(call.path))
        for call in _calls(8)
    ]
    whole, chain = _program(8, grid, calls)
    whole = replace(whole, calls=tuple(calls), parameters=dict(chain.parameters))
    options = GridOptions(grid, 16, schedule if pp > 1 else "1f1b")
    planned = grid_plan(whole, chain, options)
    asked = CompileOptions(split_backward=SCHEDULES[schedule].delays_weights)
    setting = _Setting(whole, chain, asked)
    assert setting.least_us(options) <= planned.step_us * (1 + 1e-9)
    assert setting.least_bytes(options) <= planned.total_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_no_cut_by_memory_is_below_the_bound_of_memory(schedule: str) -> None:
    """With more microbatches in flight, fewer layers: 3, 4, 6 and 12 of the 25 by 1F1B."""
    grid, layers = GridSizes(pp=4), 25
    calls = [
        replace(call, kept=((number, 10_000),))
        for number, call in enumerate(_calls(layers))
        if call.path
    ]
    whole, chain = _program(layers, grid, calls)
    options = GridOptions(grid, 8, schedule)
    bound = _Setting(whole, chain, CompileOptions()).least_bytes(options)
    totals = []
    for memory in range(50_000, 800_000, 10_000):
        with contextlib.suppress(NoCutError):
            plan = grid_plan(whole, chain, replace(options, memory=memory))
            totals.append(plan.total_bytes)
    assert bound <= min(totals)
    if schedule == "1f1b":
        # The last stage: one microbatch and the parameters of 12 layers, and the running layer.
        assert min(totals) == 12 * (10_000 + 1800) + 3
        assert bound > 0.85 * min(totals)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 3, 8, 16, 24])
def test_microbatches_in_flight_in_each_stage_of_a_rank(pp: int, microbatches: int) -> None:
    """The bound of memory takes one rank to have 1 at least, another 2, and so on."""
    for name, per_rank in itertools.product(SCHEDULES, (1, 2, 3)):
        try:
            schedule, _ = schedule_of(name, per_rank, pp, microbatches)
        except (ArgumentError, UnsupportedError):
            continue
        most = [0] * pp
        for rank, order in enumerate(schedule.orders(pp, per_rank, microbatches)):
            now = {action.stage: 0 for action in order}
            for action in order:
                now[action.stage] += action.kind is FORWARD
                now[action.stage] -= action.kind in (FULL_BACKWARD, BACKWARD_INPUTS)
                most[rank] = max(most[rank], min(now.values()))
        least = [min(number, microbatches) for number in range(1, pp + 1)]
        assert all(map(operator.ge, sorted(most), least)), (name, per_rank)


class _Block(nn.Module):
    """Passes on, beside its result, which units were positive in all blocks so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return x + y, positive & (y > 0)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        positive = x > 0
        for block in self.blocks:
            x, positive = block(x, positive)
        return {"loss": (x * positive).pow(2).mean()}


def test_values_without_gradient_do_not_come_back() -> None:
    compiled = build(_Counting(), (torch.randn(4, 8),), {}, CompileOptions(tables_apart=True))
    chain = Chain.of(compiled, compiled.plan)
    # Numbers in float32, flags in one byte.
    assert chain.gradient_bytes[-1] == 4 * 8 * 4
    assert chain.activation_bytes[-1] == 4 * 8 * (4 + 1)


def test_zero_bubble_waits_less_and_messages_take_time() -> None:
    times = [StageTimes(1.0, 2.0)] * 4
    plain = max(finish_us(SCHEDULES["1f1b"].orders(4, 1, 16), times))
    assert max(finish_us(SCHEDULES["zero_bubble"].orders(4, 1, 16), times)) < plain
    late = [replace(each, receive_us=0.5, receive_gradient_us=0.5) for each in times]
    assert max(finish_us(SCHEDULES["1f1b"].orders(4, 1, 16), late)) > plain


def test_a_weight_of_two_stages_is_on_both() -> None:
    first, _, last = _of(3, GridSizes(pp=3), 3).stages
    assert first.parameters == 1000 + 100
    assert first.state_bytes == 18 * 1100
    assert last.parameters == 100 + 8 + 1000
    assert last.state_bytes == 18 * 1100 + 16  # a frozen norm has no optimizer
    assert _of(3, GridSizes(), 3).stages[0].parameters == 1000 + 300 + 8
    found = _of(3, GridSizes(pp=3), 3, bytes_per_parameter=16)
    assert found.stages[0].state_bytes == 16 * 1100
    # Parameters of 2 bytes, gradients and two moments alike.
    found = _of(3, GridSizes(pp=3, dp_shard=2), 3, bytes_per_parameter="adamw")
    assert [stage.state_bytes for stage in found.stages] == [4400, 400, 4400 + 8]


def test_fsdp_shards_the_state_and_gathers_the_rest() -> None:
    first = _of(3, GridSizes(pp=3, dp_shard=4), 3).stages[0]
    assert first.state_bytes == 18 * 1100 / 4
    assert first.gathered_bytes == 2 * 2200  # parameters and gradients, until the last microbatch
    grid = GridSizes(pp=3, dp_shard=4)
    held = [held_bytes(size, 18, grid) for size in (_sizes(1)["w0"], _sizes(1)["norm"])]
    assert held == [18 * 100 / 4 + 2 * 200, 16 / 4 + 16]
    alone = _of(3, GridSizes(dp_shard=4), 3).stages[0]
    assert alone.gathered_bytes == 2016 + 2 * 200 + 200  # outside of blocks, two blocks, gradients
    replicated = _of(3, GridSizes(pp=3, dp_replicate=4), 3).stages[0]
    assert (replicated.state_bytes, replicated.gathered_bytes) == (18 * 1100, 2 * 2200)
    copied = _of(3, GridSizes(dp_replicate=4), 3).stages[0]
    assert copied.gathered_bytes == 2016 + 3 * 200 + 200  # all from forward to backward
    assert _of(3, GridSizes(pp=3), 3).stages[0].gathered_bytes == 0


def test_traffic_by_axis() -> None:
    grid = GridSizes(pp=3, dp_shard=4, dp_replicate=2)
    found = {each.axis: each for each in _of(3, grid, 5, gpus_per_node=4).traffic}
    assert found["pp"].sent_bytes == 2 * 5 * 1000  # the middle one: activations and gradients
    # One gather and one reduce-scatter of the last stage's, which has a frozen norm.
    assert found["dp_shard"].sent_bytes == (2 * 2200 + 16) * 3 // 4
    assert found["dp_replicate"].sent_bytes == 2 * (2200 // 4) * 1 // 2
    assert {axis: each.link for axis, each in found.items()} == {
        "dp_shard": "node",
        "dp_replicate": "network",
        "pp": "network",
    }
    # Two rings each: a gather and a reduce-scatter, or the two of an all-reduce.
    for axis in ("dp_shard", "dp_replicate"):
        link = link_of(grid, axis, 4, H100)
        rings_us = 2 * link.latency_us + found[axis].sent_bytes / link.bytes_per_us
        assert found[axis].time_us == pytest.approx(rings_us)
    # In front of the schedule and behind it nothing hides them.
    for axis in ("dp_shard", "dp_replicate"):
        assert found[axis].exposed_us == found[axis].time_us > 0
    # Without stages every microbatch gathers twice and reduces.
    (alone,) = _of(3, GridSizes(dp_shard=4), 5).traffic
    assert alone.sent_bytes == 5 * ((2 * 2616 + 2600) * 3 // 4)


def test_fewer_microbatches_than_stages_of_gpipe() -> None:
    found = _of(8, GridSizes(pp=4), 2, schedule="gpipe")
    assert [stage.in_flight for stage in found.stages] == [2, 2, 2, 2]


@pytest.mark.parametrize(("stages", "chunks"), [(4, 2), (4, 3), (2, 6), (6, 2)])
def test_interleaved_layers_in_flight_are_the_papers(stages: int, chunks: int) -> None:
    """L (1 + (p - 1) / (p m)) layers of one microbatch on the first stage."""
    layers = 24
    equal = [call for call in _calls(layers) if call.path]
    options = {"schedule": "interleaved", "stages_per_rank": chunks}
    found = _of(layers, GridSizes(pp=stages), 2 * stages, equal, **options)
    of_one = layers / (stages * chunks)
    in_layers = layers * (1 + (stages - 1) / (stages * chunks))
    assert found.stages[0].in_flight * of_one == in_layers
    masks = 7 * found.stages[0].in_flight
    assert found.stages[0].activation_bytes == 10 * in_layers + masks


def test_chunks_of_a_stage_are_apart() -> None:
    found = _of(8, GridSizes(pp=2), 4, schedule="interleaved", stages_per_rank=2)
    assert found.stages[0].chunks == (("", "blocks.0", "blocks.1"), ("blocks.4", "blocks.5"))
    assert found.stages[1].chunks == (("blocks.2", "blocks.3"), ("blocks.6", "blocks.7", ""))


@pytest.mark.parametrize("stages", [1, 3, 4, 7])
def test_layers_that_do_not_divide(stages: int) -> None:
    found = _of(10, GridSizes(pp=stages), 8)
    counts = [sum(map(bool, stage.chunks[0])) for stage in found.stages]
    assert sum(counts) == 10
    assert max(counts) - min(counts) <= 1
    paths = [path for stage in found.stages for path in stage.chunks[0]]
    assert paths == [call.path for call in _calls(10)]


@pytest.mark.parametrize(
    ("grid", "microbatches", "options", "message"),
    [
        ({"pp": 9}, 9, {}, "the model has 8 layers, too few for 9 pipeline stages"),
        ({"pp": 4}, 4, {"schedule": "interleaved", "stages_per_rank": 3}, "8 layers, too few"),
        ({"pp": 4}, 9, {"schedule": "interleaved"}, "microbatches=9: .* multiple of 4"),
        ({"pp": 4}, 2, {}, "microbatches=2: schedule='1f1b' on 4 pipeline ranks needs at least 4"),
        ({"pp": 2}, True, {}, "microbatches=True"),
        ({"pp": 2}, 2, {"schedule": "interleaved", "stages_per_rank": 1.0}, "stages_per_rank=1.0"),
        ({"pp": 2}, 2, {"bytes_per_parameter": 0}, "bytes_per_parameter=0"),
        ({"pp": 2}, 2, {"bytes_per_parameter": "18"}, "bytes_per_parameter='18': expected a fin"),
        ({"pp": 2}, 2, {"bytes_per_parameter": float("inf")}, "bytes_per_parameter=inf"),
        ({"pp": 2}, 2, {"schedule": ["1f1b"]}, r"schedule=\['1f1b'\]: expected one of"),
        ({"pp": 2}, 2, {"gpus_per_node": 0}, "gpus_per_node=0"),
        ({"pp": 2}, 2, {"recompute_rest": "full"}, "recompute_rest='full' without memory="),
    ],
)
def test_what_cannot_be(
    grid: dict[str, int], microbatches: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        _of(8, GridSizes(**grid), microbatches, **options)


def test_grids_as_users_write_them() -> None:
    assert GridSizes.of("8x35x8") == GridSizes(tp=8, pp=35, dp_replicate=8)
    assert GridSizes.of("8 x 2") == GridSizes.of({"tp": 8, "pp": 2}) == GridSizes(8, 2)
    assert GridSizes.of("tp=2, dp_shard=4") == GridSizes(2, dp_shard=4)
    assert GridSizes.of("tp=2, dp_shard=4").gpus == 8
    for wrong in ("8x", "tp=2,cp=4", {"cp": 2}, {}, 8, "tp=2;pp=2", "1x2x3x4", "tp=2,tp=4", "²x2"):
        with pytest.raises(ArgumentError, match=r"expected .* dp_replicate"):
            GridSizes.of(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tp=0: expected a positive integer"):
        GridSizes.of("tp=0")
