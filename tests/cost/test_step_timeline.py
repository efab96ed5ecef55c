"""The timeline of a step: by hand on small functions, and the trace that is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.cost.node_cost import Span
from sp_compiler.cost.step_timeline import FunctionRun, StepTimeline

# Compute 0 to 2; a gather from 2 to 7, under which 2 to 4 recomputes and 4 to 5 computes; then
# recompute from 7 to 8 that waited for it.
_BACKWARD = (
    Span("a", "mm", "compute", 0.0, 2.0),
    Span("b", "all_gather", "tp", 2.0, 7.0),
    Span("c", "gelu", "compute", 2.0, 4.0, recomputed=True),
    Span("d", "mm", "compute", 4.0, 5.0),
    Span("e", "gelu", "compute", 7.0, 8.0, recomputed=True),
)
_FORWARD = (Span("f", "mm", "compute", 0.0, 3.0), Span("g", "all_reduce", "tp", 3.0, 4.0))


def _timeline() -> StepTimeline:
    return StepTimeline(
        (
            FunctionRun("Block", "layers.0", "forward", 0.0, _FORWARD),
            FunctionRun("Block", "layers.0", "backward", 4.0, _BACKWARD),
        )
    )


def test_sums_by_hand() -> None:
    timeline = _timeline()
    assert timeline.step_us == 12.0
    assert timeline.exposed_us == {"forward": 1.0, "backward": 2.0}
    assert timeline.exposed_recompute_us == 1.0
    assert [span.begin_us for _, span in timeline.spans()] == [0.0, 3.0, 4.0, 6.0, 6.0, 8.0, 11.0]
    assert StepTimeline(()).step_us == 0.0


def test_trace(tmp_path: Path) -> None:
    _timeline().to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    streams = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert streams == ["compute", "tp"]
    rows = [
        (each["name"], each["cat"], each["tid"], each["ts"], each["dur"])
        for each in events
        if each["ph"] == "X"
    ]
    assert rows[1] == ("g", "communication", 1, 3.0, 1.0)
    assert rows[4] == ("c", "recompute", 0, 6.0, 2.0)
    assert events[-1]["args"] == {
        "operator": "gelu", "phase": "backward", "block": "Block", "layer": "layers.0"
    }  # fmt: skip


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(self.norm(x)).relu())).square().mean()


def test_a_wait_for_what_has_arrived_takes_no_time_back() -> None:
    """Kernels run one behind another, also behind the wait for a hidden collective."""
    with torch.device("meta"):
        model, x = nn.Sequential(_Wide(), _Wide()), torch.empty(8, 64, 512)
    plan = sp_compiler.plan(model, ((x,), {}), tp=2, overlap=True, recompute="full")
    hidden = 0
    for run in plan.schedule.runs:
        kernels = [span for span in run.spans if span.stream == "compute"]
        ends = [span.begin_us + span.duration_us for span in kernels]
        for end, following in zip(ends, kernels[1:], strict=False):
            assert following.begin_us >= end - 1e-9
        for span in run.spans:
            arrived_us = span.begin_us + span.duration_us
            hidden += span.stream == "tp" and any(
                kernel.begin_us < arrived_us < end - 1e-9
                for kernel, end in zip(kernels, ends, strict=True)
            )
    assert hidden  # else every wait is for its collective


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.up = nn.Linear(512, 2048, bias=False)
        self.down = nn.Linear(2048, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def test_a_plan_has_the_course_of_its_step(tmp_path: Path) -> None:
    plan = sp_compiler.plan(_Layer(), ((torch.randn(8, 64, 64),), {}), tp=2)
    assert plan.schedule.step_us == pytest.approx(plan.step_us)
    exposed_us = plan.work.communication_us - plan.work.hidden_us
    assert sum(plan.schedule.exposed_us.values()) == pytest.approx(exposed_us)
    recompute_us = sum(
        span.duration_us
        for _, span in plan.schedule.spans()
        if span.recomputed and span.stream == "compute"
    )
    assert recompute_us == pytest.approx(plan.work.recompute_us)
    assert 0 < plan.schedule.exposed_recompute_us <= recompute_us * (1 + 1e-12)
    # One device stream and one link: on neither do two spans overlap.
    for stream in ("compute", "tp"):
        ends = [0.0]
        for _, span in plan.schedule.spans():
            if span.stream == stream:
                assert span.begin_us >= ends[-1] - 1e-9
                ends.append(span.end_us)
    plan.to_trace(tmp_path / "step.json")
    names = [e["name"] for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"]]
    assert "reduce_gradients" in names
    assert plan.to_dict()["schedule"]["exposed_us"] == plan.schedule.exposed_us
