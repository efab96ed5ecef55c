"""The search for a grid, against all grids that there are."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

import sp_compiler
from sp_compiler import ArgumentError, GridPlan, suggest
from sp_compiler.command_line.models import load
from sp_compiler.grid_plan.build import grid_plan
from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.options import GridOptions
from sp_compiler.grid_plan.settings import build_settings
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.options import CompileOptions
from tests.helpers.shared_programs import shared_captures
from tests.models import zoo


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with shared_captures():
        yield


_ARGUMENTS: dict[str, Any] = {"gpus": 8, "microbatches": 8, "gpus_per_node": 2}


def _every_plan(model: Any, inputs: Any) -> dict[GridSizes, list[GridPlan]]:
    """Plans of 8 devices with two policies, by grid."""
    settings = [
        CompileOptions(
            tp=tp, recompute=recompute, tables_apart=True, loss_only=staged, split_backward=split
        )
        for tp in (1, 2)
        for staged, split in ((False, False), (True, False), (True, True))
        for recompute in ("none", "full")
    ]
    plans: dict[GridSizes, list[GridPlan]] = {}
    for setting, compiled in zip(
        settings, build_settings(model, (), inputs, settings), strict=True
    ):
        plan, tp = compiled.plan, compiled.plan.tp
        stages = (2, 4) if setting.loss_only else (1,)
        chain = Chain.of(compiled, plan) if setting.loss_only else Chain.uncut(plan)
        schedules = (("1f1b", None), ("interleaved", 2))
        if setting.split_backward:
            schedules = (("zero_bubble", None),)
        for pp, axis, (schedule, count) in itertools.product(
            stages, ("dp_shard", "dp_replicate"), schedules
        ):
            grid = GridSizes(tp, pp, **{axis: 8 // tp // pp})
            with contextlib.suppress(ArgumentError):  # too few microbatches, or layers
                options = GridOptions(grid, 8 // grid.data, schedule, count, gpus_per_node=2)
                made = grid_plan(plan, chain, options)
                plans.setdefault(grid, []).append(made)
    return plans


@pytest.mark.slow
def test_the_best_of_each_grid_is_found_and_those_that_do_not_fit_are_left_out() -> None:
    model, inputs = zoo.build("gpt2", layers=4), zoo.inputs("gpt2")
    every = _every_plan(model, inputs)
    sizes = sorted(plan.total_bytes for plans in every.values() for plan in plans)
    memory = sizes[len(sizes) // 2]
    found = [
        plan
        for recompute in ("none", "full")
        for plan in suggest(
            model, ((), inputs), memory=memory, top=99, recompute=recompute, **_ARGUMENTS
        )
    ]
    best: dict[GridSizes, float] = {}
    for plan in found:
        assert plan.total_bytes <= memory
        best[plan.grid] = min(plan.step_us, best.get(plan.grid, plan.step_us))
    for grid, plans in every.items():
        fitting = [plan.step_us for plan in plans if plan.total_bytes <= memory]
        if fitting:  # a cut by memory may find more, and another time
            assert best[grid] == pytest.approx(min(fitting), rel=1e-9), grid
    assert len(found) < len(every) * 2


@pytest.mark.slow
def test_what_is_shown() -> None:
    inputs = ((), zoo.inputs("gpt2"))
    model = zoo.build("gpt2", layers=4)
    found = suggest(model, inputs, memory="1GiB", top=2, recompute="full", **_ARGUMENTS)
    assert [plan.step_us for plan in found] == sorted(plan.step_us for plan in found)
    assert len(found) == 2
    assert found[0].grid.gpus == 8
    text = str(found)
    assert f"{found[0].grid}" in text
    assert "% slower: " in text
    assert "Other grids" in text
    data = json.loads(found.to_json())
    assert data["plans"][0]["step_us"] == found[0].step_us
    assert data["rejected"][0]["reason"].startswith("a step takes")
    none = suggest(model, inputs, memory="1KiB", recompute="full", **_ARGUMENTS)
    assert not none
    assert "No grid fits 1.00 KiB per device." in str(none)
    assert all("needs at least" in each.reason for each in none.rejected[:3])


@pytest.mark.slow
def test_memory_that_one_setting_leaves_is_used_by_another() -> None:
    model, inputs = zoo.build("gpt2", layers=4), ((), zoo.inputs("gpt2"))
    arguments: dict[str, Any] = {**_ARGUMENTS, "gpus": 2, "gpus_per_node": 1}
    on_grid: dict[str, Any] = {"mesh": "pp=2", "microbatches": 8, "gpus_per_node": 1}
    alone = {
        name: sp_compiler.plan(model, inputs, recompute=name, **on_grid)
        for name in ("none", "full")
    }
    memory = alone["none"].total_bytes - 1
    twice = ["1f1b", "1f1b"]  # is once
    found = suggest(model, inputs, memory=memory, schedules=twice, **arguments)
    (mixed,) = (each for each in found if each.grid == GridSizes(pp=2))
    assert mixed.rest is not None
    assert mixed.total_bytes <= memory
    assert alone["none"].step_us < mixed.step_us < alone["full"].step_us
    # What a pipeline is to be told, and nothing else.
    (data,) = (each for each in found.to_dict()["plans"] if each["pp"] == 2)
    settings = {name: data[name] for name in ("recompute", "recompute_rest", "memory")}
    again = sp_compiler.plan(model, inputs, **settings, **on_grid)
    assert again.stages == mixed.stages
    assert again.step_us == mixed.step_us
    share = 100 * sum(stage.saving[0] for stage in mixed.stages) / 16
    assert f"{data['recompute']} for {share:.0f} %, else {data['recompute_rest']}" in str(found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpus": 0}, "gpus=0: expected a positive int"),
        ({"memory": "80GB"}, "memory='80GB'"),
        ({"schedules": ["1f1b", "zb"]}, r"schedules=\['1f1b', 'zb'\]: expected a list of 1f1b"),
        ({"schedules": []}, r"schedules=\[\]: expected a list of 1f1b"),
        ({"schedules": None}, "schedules=None: expected a list of 1f1b"),
        ({"schedules": [["1f1b"]]}, r"schedules=\[\['1f1b'\]\]: expected a list of 1f1b"),
        ({"tp": 2}, "tp=2: suggest finds it; leave it out"),
        ({"mesh": "tp=2"}, "mesh='tp=2': suggest finds it; leave it out"),
        ({"top": True}, "top=True"),
        ({"recompute": "auto"}, "recompute='auto' with memory_budget=None"),
        ({"bytes_per_parameter": -1}, "bytes_per_parameter=-1"),
        ({"recompute_rest": "full"}, "recompute_rest='full': only stages"),
        ({"strict": True}, "strict=True"),
        ({"device_memory": "1GiB"}, "device_memory='1GiB': suggest takes memory="),
    ],
)
def test_what_cannot_be(changed: dict[str, Any], message: str) -> None:
    arguments = {"memory": "1GiB", **_ARGUMENTS, **changed}
    with pytest.raises(ArgumentError, match=message):
        suggest(zoo.build("gpt2"), ((), zoo.inputs("gpt2")), **arguments)


@pytest.mark.slow
def test_a_model_of_a_paper() -> None:
    """Tensor parallel in a node and pipeline across nodes, as arXiv 2205.05198 runs GPT-3 175B."""
    loaded = load(None, "gpt3-175b")
    found = suggest(
        loaded.model,
        loaded.example_inputs,
        gpus=64,
        memory="80GiB",
        microbatches=64,
        top=3,
        recompute="selective",
    )
    assert found[0].total_bytes <= 80 * 2**30
    assert GridSizes(tp=8, pp=8) in [plan.grid for plan in found]
