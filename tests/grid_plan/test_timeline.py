"""The course of a step over a pipeline: by hand on two ranks, its sums, and its trace."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sp_compiler.api import plan
from sp_compiler.cost.node_cost import Span
from sp_compiler.cost.step_timeline import FunctionRun, StepTimeline
from sp_compiler.grid_plan.figures import GridFigure
from sp_compiler.grid_plan.stage_plan import StagePlan
from sp_compiler.grid_plan.timeline import GridTimeline
from sp_compiler.grid_plan.timetable import StageTimes, run_orders
from sp_compiler.pipeline_parallel.schedules import FORWARD, FULL_BACKWARD, SCHEDULES
from tests.models import zoo

# A forward of 2 us and a reduction of 1 that nothing hides; a backward of 5, where 1 gathers
# while 0.5 recomputes.
_FORWARD = (Span("mm", "mm", "compute", 0.0, 2.0), Span("sum", "reduce_scatter", "tp", 2.0, 3.0))
_BACKWARD = (
    Span("gather", "all_gather", "tp", 0.0, 1.0),
    Span("gelu", "gelu", "compute", 0.0, 0.5, recomputed=True),
    Span("tanh", "tanh", "compute", 1.0, 2.0, recomputed=True),
    Span("mm", "mm", "compute", 2.0, 5.0),
)


def _function(phase: str, spans: tuple[Span, ...]) -> StepTimeline:
    return StepTimeline((FunctionRun("Block", "layers.0", phase, 0.0, spans),))


def _timeline(microbatches: int, data_us: Sequence[float] = (0.0, 0.0)) -> GridTimeline:
    functions = {
        FORWARD: _function("forward", _FORWARD),
        FULL_BACKWARD: _function("backward", _BACKWARD),
    }
    first = StageTimes(3.0, 5.0, receive_gradient_us=0.25)
    last = StageTimes(3.0, 5.0, receive_us=0.5)
    orders = SCHEDULES["1f1b"].orders(2, 1, microbatches)
    return GridTimeline(orders, [first, last], [functions] * 2, data_us, reduction_us=2.0)


def test_two_ranks_by_hand() -> None:
    found = _timeline(2, data_us=(4.0, 0.0))
    first, second = (
        [(each.begin_us, each.end_us, each.bubble_us, each.message_us) for each in own]
        for own in found.runs
    )
    # F0 F1 B0 B1 on the first; F0 B0 F1 B1 on the second, which waits for F0 and its message.
    assert first == [
        (0, 3, 0, 0),
        (3, 6, 0, 0),
        (11.75, 16.75, 5.5, 0.25),
        (19.75, 24.75, 2.75, 0.25),
    ]
    assert second == [(3.5, 6.5, 3, 0.5), (6.5, 11.5, 0, 0), (11.5, 14.5, 0, 0), (14.5, 19.5, 0, 0)]
    assert found.step_us == 24.75 + 4.0 + 2.0
    times = found.rank_times()
    # Exposed: 1 of each forward, and of each backward the half under which nothing runs.
    assert [each.exposed_us["tp"] for each in times] == [2 * 1.5 + 2.0] * 2
    assert [each.exposed_us["pp"] for each in times] == [0.5, 0.5]
    assert [each.exposed_us["dp"] for each in times] == [4.0, 0.0]
    assert [each.compute_us for each in times] == [2 * (3 + 5 - 1.5)] * 2
    assert [each.recompute_us for each in times] == [2 * 1.0] * 2
    assert times[0].bubble_us == 5.5 + 2.75
    assert times[1].bubble_us == 3.0 + (24.75 + 4.0 - 19.5)


def _figure() -> GridFigure:
    def stage(activation_bytes: int) -> StagePlan:
        return StagePlan(
            chunks=(("layers.0",),), parameters=10, state_bytes=180, gathered_bytes=0,
            activation_bytes=activation_bytes, working_bytes=40, in_flight=2, forward_us=3.0,
            backward_us=5.0, saving=(2,),
        )  # fmt: skip

    return GridFigure("Net <8>", "A step", "H100", [stage(200), stage(100)], _timeline(2))


def test_a_page_draws_every_action_where_its_time_is() -> None:
    text = _figure().page("a < b")
    assert "<h1>Net &lt;8&gt;</h1>" in text
    assert "<pre>a &lt; b</pre>" in text
    # By rank and kind, from the left in parts of a step: F0, F1 and then B0, B1 of the first rank.
    boxes = [re.findall(r"M([\d.]+) ", path) for path in re.findall(r'fill=".*?" d="(.*?)"', text)]
    by_hand = [[0, 3], [11.75, 19.75], [3.5, 11.5], [6.5, 14.5]]
    scale = 960 / 26.75
    assert [list(map(float, own)) for own in boxes] == [
        [round(begin * scale, 1) for begin in own] for own in by_hand
    ]
    # At most eight parts of 1, 2 or 5 times a power of ten.
    ticks = re.findall(r'<text class="time" x="([\d.]+)" y=".*?">(.*?)</text>', text)
    marks = [(time, f"{time}.0 us") for time in (5, 10, 15, 20, 25)]
    assert ticks == [(f"{time * scale:.1f}", text) for time, text in [(0, "0"), *marks]]


def test_a_figure_draws_them_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    figure = _figure().draw(limit_bytes=1024)
    memory, course = figure.axes
    assert [text.get_text() for text in memory.texts] == ["limit 1.00 KiB"]
    bars = [bar.get_height() for bar in memory.patches]
    assert bars == [180, 180, 200, 100, 40, 40]
    boxes = [each.get_paths() for each in course.collections]
    assert [path.get_extents().x0 for own in boxes for path in own] == [
        0, 3, 11.75, 19.75, 3.5, 11.5, 6.5, 14.5,
    ]  # fmt: skip
    assert [text.get_text() for text in course.texts] == [*"01010011"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zero_bubble", "dualpipev"])
def test_actions_of_a_rank_follow_each_other_and_what_they_need(name: str) -> None:
    schedule, ranks, per_rank = SCHEDULES[name], 4, 2 if name in ("interleaved", "dualpipev") else 1
    stages = ranks * per_rank
    times = [StageTimes(1.0 + stage / 10, 2.0, 0.3, 0.2, (1.2, 0.7)) for stage in range(stages)]
    orders = schedule.orders(ranks, per_rank, 8)
    runs = run_orders(orders, times)
    end_us = {each.action: each.end_us for own in runs for each in own}
    assert len(end_us) == sum(map(len, orders))
    for own, order in zip(runs, orders, strict=True):
        assert [each.action for each in own] == order
        free_us = 0.0
        for each in own:
            kind, stage, number = each.action
            assert each.free_us == free_us
            assert each.begin_us >= free_us
            assert each.end_us == each.begin_us + times[stage].action_us(each.action)
            # It begins late by what it waits for, and by nothing else.
            assert each.begin_us - free_us == pytest.approx(each.bubble_us + each.message_us)
            if kind is FORWARD and stage:
                before = next(a for a in end_us if a == (FORWARD, stage - 1, number))
                assert each.begin_us >= end_us[before] + 0.3
            free_us = each.end_us


def test_trace(tmp_path: Path) -> None:
    _timeline(3, data_us=(4.0, 0.0)).to_trace(tmp_path / "step.json", kernels_of=2)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({pid for pid, _ in names}) == 2
    drawn = [each for each in events if each["ph"] == "X"]

    def of(row: str, rank: int, category: str) -> list[dict[str, Any]]:
        return [
            each
            for each in drawn
            if (names[each["pid"], each["tid"]], each["pid"], each["cat"]) == (row, rank, category)
        ]

    actions = of("compute", 0, "action")
    assert sorted(each["name"] for each in actions) == ["B0", "B1", "B2", "F0", "F1", "F2"]
    # Of two microbatches every kernel, each inside of its action.
    kernels = of("compute", 0, "compute") + of("compute", 0, "recompute")
    assert len(kernels) == 2 * 4
    for kernel in kernels:
        assert any(a["ts"] <= kernel["ts"] <= a["ts"] + a["dur"] for a in actions)
    assert len(of("tp", 1, "communication")) == 2 * 2
    assert [each["dur"] for each in of("pp gradients", 0, "communication")] == [0.25] * 3
    assert [each["dur"] for each in of("pp activations", 1, "communication")] == [0.5] * 3
    assert [each["dur"] for each in of("dp", 0, "communication")] == [4.0]


def test_a_plan_has_the_course_of_its_step(tmp_path: Path) -> None:
    model, inputs = zoo.build("gpt2", layers=2), ((), zoo.inputs("gpt2"))
    mesh = "tp=2,pp=2,dp_shard=2"
    found = plan(model, inputs, mesh=mesh, microbatches=4, schedule="zero_bubble")
    assert found.timeline.step_us == pytest.approx(found.step_us)
    times = found.timeline.rank_times()
    for each in times:
        total_us = each.compute_us + sum(each.exposed_us.values()) + each.bubble_us
        assert total_us == pytest.approx(found.step_us)
        assert each.bubble_us >= 0
    assert found.to_dict()["timeline"][0]["bubble_us"] == times[0].bubble_us
    # The two functions of a backward have their own times.
    halves = [each.split_us for each in found.timeline.times]
    assert all(half is not None and half[0] > half[1] > 0 for half in halves)
    found.to_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {"W0", "I0", "F0"} <= {each["name"] for each in events}
