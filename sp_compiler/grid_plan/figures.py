"""A plan on a grid as a figure and as a page: memory of every stage, timeline of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.grid_plan.stage_plan import StagePlan
from sp_compiler.grid_plan.timeline import GridTimeline
from sp_compiler.grid_plan.timetable import ActionRun
from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    FULL_BACKWARD,
)
from sp_compiler.planning.figures import BESIDE, draw_limit, new_figure, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    FORWARD: "#3b76af",
    FULL_BACKWARD: "#c8652d",
    BACKWARD_INPUTS: "#c8652d",
    BACKWARD_WEIGHTS: "#e0a13c",
}
_NAMES = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUTS: "backward, inputs",
    BACKWARD_WEIGHTS: "backward, weights",
}
_MEMORY = {
    "state_bytes": ("state", "#5d6d7e"),
    "gathered_bytes": ("gathered", "#95a5a6"),
    "activation_bytes": ("activations", "#3b76af"),
    "working_bytes": ("working", "#c8652d"),
}
_WIDTH, _ROW = 960, 22  # of the page's drawing, in pixels
_MOST_TICKS = 8
_LEGIBLE = 13  # pixels that a number of two digits takes on the page
_LEGIBLE_INCHES = 0.17  # and in the figure


@dataclass(frozen=True)
class GridFigure:
    """Data of a plan on a grid that is drawn.

    Attributes:
        heading: model and grid.
        course: title of the step's timeline.
        device: name of the hardware that times are estimated for.
        stages: what each rank of the pipeline holds.
        timeline: what each rank of the pipeline does.
    """

    heading: str
    course: str
    device: str
    stages: Sequence[StagePlan]
    timeline: GridTimeline

    def draw(self, limit_bytes: int | None) -> Figure:
        """Draw memory by rank, with a line at ``limit_bytes``, and below it the timeline."""
        num_ranks = len(self.timeline.runs)
        figure, (memory, course) = new_figure((2.4, max(1.0, 0.22 * num_ranks + 0.4)))
        figure.suptitle(self.heading)
        self._draw_memory(memory, limit_bytes)
        self._draw_course(course, figure.get_figwidth())
        return figure

    def page(self, text: str) -> str:
        """The text of a page: the timeline of the step as a drawing, and the tables ``text``."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        source = files("sp_compiler.grid_plan").joinpath("grid_page.html")
        kinds = {run.action.kind: None for runs in self.timeline.runs for run in runs}
        return environment.from_string(source.read_text(encoding="utf-8")).render(
            heading=self.heading,
            course=self.course,
            text=text,
            keys=[(_NAMES[kind], _COLORS[kind]) for kind in kinds],
            rows=list(_rows(self.timeline)),
            ticks=list(_ticks(self.timeline.step_us)),
            device=self.device,
            width=_WIDTH,
            row=_ROW,
        )

    def _draw_memory(self, axes: Axes, limit_bytes: int | None) -> None:
        most = max(stage.total_bytes for stage in self.stages)
        unit, scale = size_unit(most)
        base = [0.0] * len(self.stages)
        for attribute, (name, color) in _MEMORY.items():
            heights = [getattr(stage, attribute) / scale for stage in self.stages]
            if any(heights):
                axes.bar(range(len(base)), heights, bottom=base, color=color, label=name)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        top = max(base)
        if limit_bytes is not None:
            draw_limit(axes, limit_bytes, scale)
            top = max(top, limit_bytes / scale)
        axes.set(xlabel="pipeline rank", ylabel=unit, ylim=(0, 1.16 * top))
        axes.locator_params(axis="x", integer=True)
        axes.set_title(f"Memory of a device, at most {bytes_text(most)}", loc="left")
        axes.legend(**BESIDE)

    def _draw_course(self, axes: Axes, width_inches: float) -> None:
        step_us = self.timeline.step_us
        unit_us, unit = (1e3, "ms") if step_us >= 1e3 else (1.0, "us")
        legible_us = _LEGIBLE_INCHES / width_inches * step_us
        used: dict[Any, None] = {}
        for rank, runs in enumerate(self.timeline.runs):
            for kind in dict.fromkeys(run.action.kind for run in runs):
                used[kind] = None
                same = [run for run in runs if run.action.kind is kind]
                took = [(run.end_us - run.begin_us) / unit_us for run in same]
                begins = [run.begin_us / unit_us for run in same]
                axes.broken_barh(
                    list(zip(begins, took, strict=True)), (rank - 0.45, 0.9),
                    facecolor=_COLORS[kind], edgecolor="white", linewidth=0.3,
                )  # fmt: skip
            for run in runs:
                if run.end_us - run.begin_us > legible_us:
                    axes.text(
                        (run.begin_us + run.end_us) / 2 / unit_us, rank, str(run.action.microbatch),
                        ha="center", va="center", color="white", fontsize=7,
                    )  # fmt: skip
        for kind in used:
            axes.bar(0, 0, color=_COLORS[kind], label=_NAMES[kind])
        axes.set(xlim=(0, step_us / unit_us), ylim=(len(self.timeline.runs) - 0.5, -0.5))
        axes.locator_params(axis="y", integer=True)
        axes.set(xlabel=f"{unit} on {self.device}, estimated", ylabel="pipeline rank")
        axes.set_title(self.course, loc="left")
        axes.legend(**BESIDE)


@dataclass(frozen=True)
class _Row:
    """A rank in the page's drawing: outlines of its boxes by color, and numbers if they fit."""

    y: int
    paths: list[tuple[str, str]]
    numbers: list[tuple[float, int]]
    title: str


def _rows(timeline: GridTimeline) -> Iterator[_Row]:
    scale = _WIDTH / (timeline.step_us or 1.0)
    for rank, (runs, spent) in enumerate(zip(timeline.runs, timeline.rank_times(), strict=True)):
        # One outline per kind and rank, because a large step has tens of thousands of actions.
        paths = [
            (
                _COLORS[kind],
                "".join(_outline(run, scale) for run in runs if run.action.kind is kind),
            )
            for kind in dict.fromkeys(run.action.kind for run in runs)
        ]
        numbers = [
            ((run.begin_us + run.end_us) / 2 * scale, run.action.microbatch)
            for run in runs
            if (run.end_us - run.begin_us) * scale > _LEGIBLE
        ]
        computes, waits = time_text(spent.compute_us), time_text(spent.bubble_us)
        yield _Row(rank * _ROW, paths, numbers, f"rank {rank}: computes {computes}, waits {waits}")


def _ticks(step_us: float) -> Iterator[tuple[float, str]]:
    """Return positions of the page's time axis and their texts: multiples of 1, 2 or 5 times a
    power of ten."""
    least = step_us / _MOST_TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    apart = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    for number in range(math.floor(step_us / apart) + 1):
        text = time_text(number * apart) if number else "0"
        yield number * apart * _WIDTH / (step_us or 1.0), text


def _outline(run: ActionRun, scale: float) -> str:
    # Half a pixel narrower, so that neighbours of the same color are distinguishable.
    left, wide = run.begin_us * scale, max(0.2, (run.end_us - run.begin_us) * scale - 0.5)
    return f"M{left:.1f} 1h{wide:.1f}v{_ROW - 2}h-{wide:.1f}z"
