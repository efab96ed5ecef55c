"""Figures of a plan: what is drawn where, and what is said without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler import UnsupportedError
from sp_compiler.api import plan
from sp_compiler.planning.plan import Plan

_INPUTS: Any = ((torch.randn(4, 8),), {})


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def _plan(**options: Any) -> Plan:
    return plan(_Mlp(), _INPUTS, **options)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib, or use to_html"):
        _plan(tp=1).plot()


def test_memory_course_and_weights(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    found = _plan(tp=2, device_memory="1MiB")
    figure = found.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    memory, course, weights = figure.axes
    scale = 1024
    # A bar per call and phase, each on the state that lies below.
    state = found.total_bytes - found.activation_peak_bytes
    tops = {round((bar.get_y() + bar.get_height()) * scale) for bar in memory.patches}
    assert tops == {state, *(state + moment.num_bytes for moment in found.timeline)}
    assert any(text.get_text() == "limit 1.00 MiB" for text in memory.texts)
    spans = [span for key in found.schedule.functions.values() for span in key]
    assert len(course.collections) == len(spans)
    assert [text.get_text() for text in course.get_yticklabels()] == ["link", "device"]
    # Columns of the first weight are rows of the second; a part per rank of all that is sharded.
    sharded = [each for each in found.parameters.values() if each.placement.startswith("S")]
    assert len(weights.collections) == 2 * len(sharded)
    assert {text.get_text().partition(",")[0] for text in weights.texts} == {
        "16 x 8 on each rank", "16 on each rank", "8 x 16 on each rank", "8",
    }  # fmt: skip


def test_one_rank_has_no_link_and_nothing_to_share() -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    _, course = _plan(tp=1).plot().axes
    assert [text.get_text() for text in course.get_yticklabels()] == ["device"]


def test_a_model_without_operators_has_only_a_course_of_memory() -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    assert len(plan(nn.Identity(), _INPUTS, tp=1).plot().axes) == 1
