"""Simulation of a step on a grid: what each rank of the pipeline and its links do when.

A rank computes one action at a time. Within it, collectives over "tp" overlap with kernels as the
generated functions start them and wait for them; between ranks, activations and their gradients
travel while both compute. Data axes gather before a pipeline's schedule and reduce after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sp_compiler.cost.step_timeline import StepTimeline, category_of
from sp_compiler.grid_plan.timetable import ActionRun, StageTimes, run_orders
from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    FULL_BACKWARD,
    Action,
)

Functions = Mapping[Any, StepTimeline]
"""The functions that an action of a stage runs, by the action's kind."""

_LETTERS = {FORWARD: "F", FULL_BACKWARD: "B", BACKWARD_INPUTS: "I", BACKWARD_WEIGHTS: "W"}
# Activations and gradients may arrive over the same axis at the same time: one row each.
_ROWS = ("compute", "tp", "pp activations", "pp gradients", "dp")


@dataclass(frozen=True)
class RankTime:
    """Times of one rank of a pipeline in a step; all except ``recompute_us`` add up to the step.

    Attributes:
        compute_us: time in which kernels run.
        recompute_us: part of ``compute_us`` that recomputes while nothing is sent over "tp".
        exposed_us: by axis, time in which only a transfer over that axis runs.
        bubble_us: time of waiting for other ranks to compute, between the first and the last action
            of any rank.
    """

    compute_us: float
    recompute_us: float
    exposed_us: Mapping[str, float]
    bubble_us: float


@dataclass(frozen=True)
class GridTimeline:
    """A simulated step on a grid.

    Attributes:
        orders: actions of every rank, in the order of the schedule.
        times: times of every stage.
        functions: generated functions of every stage, by kind of action.
        data_us: per rank, exposed time of transfers over the data axes.
        reduction_us: time of the final reduction over "tp" of replicated parameters' gradients.
        rest_functions: like ``functions``, for microbatches that recompute more, if any.
    """

    orders: Sequence[Sequence[Action]]
    times: Sequence[StageTimes]
    functions: Sequence[Functions]
    data_us: Sequence[float]
    reduction_us: float
    rest_functions: Sequence[Functions] = ()

    @cached_property
    def runs(self) -> list[list[ActionRun]]:
        """The actions of every rank with their times."""
        return run_orders(self.orders, self.times)

    @property
    def step_us(self) -> float:
        """Time from the first forward to the last gradient."""
        # The reduction over "tp" is last: one reduction for the gradients of all microbatches.
        ends = (own[-1].end_us + data_us for own, data_us in self._by_rank())
        return max(ends) + self.reduction_us

    def rank_times(self) -> list[RankTime]:
        """Return how each rank spends the time of the step."""
        times = []
        for own, data_us in self._by_rank():
            costs = [self._functions(run) for run in own]
            # A plan without function timelines has only actions, which count as compute.
            tp_us = sum(sum(each.exposed_us.values()) for each in costs)
            pp_us = sum(run.message_us for run in own)
            acting_us = sum(run.end_us - run.begin_us for run in own)
            # The remainder: a rank waits before, within and after its schedule.
            waits_us = self.step_us - self.reduction_us - acting_us - pp_us - data_us
            times.append(
                RankTime(
                    compute_us=acting_us - tp_us,
                    recompute_us=sum(each.exposed_recompute_us for each in costs),
                    exposed_us={"tp": tp_us + self.reduction_us, "pp": pp_us, "dp": data_us},
                    bubble_us=waits_us,
                )
            )
        return times

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data: the times of every rank."""
        return [asdict(each) for each in self.rank_times()]

    def to_trace(self, path: str | Path, *, kernels_of: int = 1) -> None:
        """Write a trace for ``chrome://tracing`` or Perfetto, one process per pipeline rank.

        A process has rows for the device, the link of "tp", messages that arrive from either side,
        and the data axes, whose transfers are drawn after the schedule.

        Args:
            path: file to write.
            kernels_of: number of microbatches, from the first, for which every kernel and every
                collective is drawn. For the others only their actions are drawn: a step of a large
                model has millions of kernels.
        """
        events = [
            {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}}
            for rank in range(len(self.runs))
            for kind, tid, name in (
                ("process_name", 0, f"pipeline rank {rank}"),
                *(("thread_name", tid, name) for tid, name in enumerate(_ROWS)),
            )
        ]
        for rank, (own, data_us) in enumerate(self._by_rank()):
            for run in own:
                events += self._events(rank, run, drawn=run.action.microbatch < kernels_of)
            if data_us:
                begin_us = own[-1].end_us
                events.append(_event(rank, "dp", "gather and reduce", begin_us, data_us))
        # The display unit; times are in microseconds. In ms short kernels would be shown as 0.
        trace = {"traceEvents": events, "displayTimeUnit": "ns"}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def _events(self, rank: int, run: ActionRun, *, drawn: bool) -> Iterator[dict[str, Any]]:
        kind, stage, number = run.action
        about = {"stage": stage, "microbatch": number, "phase": kind.name.lower()}
        name, took_us = f"{_LETTERS[kind]}{number}", run.end_us - run.begin_us
        yield _event(rank, "compute", name, run.begin_us, took_us, category="action", **about)
        # Time in transit, not the time that was waited for it, which is the exposed part.
        times = self.times[stage]
        travel_us = times.receive_us if kind is FORWARD else times.receive_gradient_us
        if run.sent_us and travel_us:
            row = "pp activations" if kind is FORWARD else "pp gradients"
            yield _event(rank, row, name, run.sent_us, travel_us, **about)
        if not drawn:
            return
        # A function's times are relative to the start of the action.
        for function, span in self._functions(run).spans():
            yield _event(
                rank,
                span.stream,
                span.name,
                run.begin_us + span.begin_us,
                span.duration_us,
                category=category_of(span),
                operator=span.operator,
                layer=function.path,
                **about,
            )

    def _by_rank(self) -> Iterator[tuple[list[ActionRun], float]]:
        yield from zip(self.runs, self.data_us, strict=True)

    def _functions(self, run: ActionRun) -> StepTimeline:
        stage = run.action.stage
        recomputes = self.times[stage].recomputes(run.action.microbatch)
        functions = (self.rest_functions if recomputes else self.functions)[stage]
        # A stage of only frozen layers has no backward, but keeps its place in the schedule.
        return functions.get(run.action.kind, StepTimeline(()))


def _event(
    rank: int, row: str, name: str, begin_us: float, took_us: float, **about: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": about.pop("category", "communication"),
        "ts": begin_us,
        "dur": took_us,
        "pid": rank,
        "tid": _ROWS.index(row),
        "args": about,
    }
