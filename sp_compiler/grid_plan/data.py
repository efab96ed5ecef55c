"""A readable plan of a training step on a grid: memory per stage, traffic per axis, time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from sp_compiler.base.units import bytes_text, parse_bytes, time_text
from sp_compiler.grid_plan.figures import GridFigure
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.grid_plan.stage_plan import BytesPerParameter, StagePlan
from sp_compiler.grid_plan.timeline import GridTimeline
from sp_compiler.planning.figures import save
from sp_compiler.planning.html import framed
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.table_text import table


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic over one axis of the grid.

    Attributes:
        axis: its name.
        link: "node" inside a node, "network" between nodes.
        sent_bytes: bytes per step sent by the rank that sends most.
        time_us: time of that rank's transfers if nothing else runs.
        exposed_us: part of ``time_us`` during which that rank computes nothing; for ``pp`` it is
            counted in the bubble.
    """

    axis: str
    link: str
    sent_bytes: int
    time_us: float
    exposed_us: float


@dataclass(frozen=True)
class GridPlan:
    """Costs of one training step on a grid; ``print(plan)`` shows tables.

    Attributes:
        microbatch: the plan of one microbatch through all layers, on the ranks of ``tp``.
        grid: number of ranks on each axis.
        schedule: name of the pipeline's schedule, as for :func:`sp_compiler.pipeline`.
        stages_per_rank: number of stages on each rank of the pipeline.
        microbatches: number of microbatches per step on each rank of the data axes.
        bytes_per_parameter: bytes of a trained parameter with its gradient and optimizer state, or
            "adamw".
        stages: memory and time of each rank of the pipeline, on one device.
        traffic: one entry per axis of several ranks.
        step_us: estimated time from the first forward to the last gradient, without the optimizer.
        bubble: waiting time of the slowest rank of the pipeline, divided by its computing time;
            (p - 1) / (v m) for p equal ranks with v stages each and m microbatches.
        timeline_maker: derives :attr:`timeline` at its first use.
        rest: the plan of a microbatch with ``recompute_rest``, for those that do not fit otherwise.
        memory_bytes: memory limit of each stage for the cut, if there is one.
    """

    microbatch: Plan
    grid: GridSizes
    schedule: str
    stages_per_rank: int
    microbatches: int
    bytes_per_parameter: BytesPerParameter
    stages: tuple[StagePlan, ...]
    traffic: tuple[AxisTraffic, ...]
    step_us: float
    bubble: float
    # Not compared, because the other fields determine it.
    timeline_maker: Callable[[], GridTimeline] = field(repr=False, compare=False)
    rest: Plan | None = None
    memory_bytes: int | None = None

    @cached_property
    def timeline(self) -> GridTimeline:
        """The simulated step: the actions of each rank, and how it spends its time."""
        # On demand: a search makes many plans, and a large step has tens of thousands of actions.
        return self.timeline_maker()

    @property
    def total_bytes(self) -> int:
        """Bytes per device of the stage that needs most."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's FLOPs over the peak of all devices in the step."""
        # Per rank of the pipeline: "tp" is part of a microbatch's time, and data axes multiply both
        # sides.
        available_us = self.step_us * self.grid.pp
        ideal_us = self.microbatches * self.microbatch.work.ideal_us
        return ideal_us / available_us if available_us else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, including derived properties."""
        # Not ``asdict``, which would copy the plan of the microbatch field by field.
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["timeline_maker"]
        return {
            **own,
            "microbatch": self.microbatch.to_dict(),
            "rest": None if self.rest is None else self.rest.to_dict(),
            "grid": {**asdict(self.grid), "gpus": self.grid.gpus},
            "stages": [
                {**asdict(stage), "total_bytes": stage.total_bytes} for stage in self.stages
            ],
            "traffic": [asdict(each) for each in self.traffic],
            "total_bytes": self.total_bytes,
            "mfu": self.mfu,
            "timeline": self.timeline.to_dict(),
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_trace(self, path: str | Path, *, kernels_of: int = 1) -> None:
        """Write the simulated step for ``chrome://tracing`` or Perfetto: one process per rank of
        the pipeline, with its actions, the kernels of the first ``kernels_of`` microbatches,
        collectives over ``tp``, messages over ``pp`` and transfers over the data axes."""
        self.timeline.to_trace(path, kernels_of=kernels_of)

    def to_html(self, path: str | Path) -> None:
        """Write an HTML page with the timeline of every rank of the pipeline and the tables; it
        works offline."""
        Path(path).write_text(self._figure.page(str(self)), encoding="utf-8")

    def plot(self, path: str | Path | None = None, *, memory: int | str | None = None) -> Any:
        """Draw the memory of each rank of the pipeline, and its timeline in a step.

        Needs matplotlib (``sp-compiler[plot]``).

        Args:
            path: optional file to write; its suffix determines the format (".png", ".svg", ".pdf").
            memory: memory limit of a device to draw, in bytes or as "80GiB".

        Returns:
            A ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
            ArgumentError: ``memory`` is not a size.
            UnsupportedError: matplotlib is not installed.
        """
        figure = self._figure.draw(None if memory is None else parse_bytes("memory", memory))
        save(figure, path)
        return figure

    def _repr_html_(self) -> str:
        """Show the page of :meth:`to_html` in a notebook."""
        return framed(self._figure.page(str(self)))

    @property
    def _figure(self) -> GridFigure:
        step = f"{time_text(self.step_us)}, bubble {100 * self.bubble:.1f} %"
        return GridFigure(
            f"{self.microbatch.model_name} on {self.grid.gpus} devices: {self.grid}",
            f"A step of {self.microbatches} microbatches, schedule {self.schedule}: {step}",
            self.microbatch.hardware.name,
            self.stages,
            self.timeline,
        )

    def __str__(self) -> str:
        plan, per_rank = self.microbatch, self.stages_per_rank
        chunks = f" of {per_rank} chunks" if per_rank > 1 else ""
        stages = f"{len(self.stages)} pipeline stages{chunks}, schedule {self.schedule}, "
        lines = [
            f"{plan.model_name} on {self.grid.gpus} x {plan.hardware.name}: {self.grid}; "
            f"recompute={plan.options['recompute']}",
            f"{stages if self.grid.pp > 1 else ''}{self.microbatches} microbatches; bubble "
            f"{100 * self.bubble:.1f} %, estimated step {time_text(self.step_us)}, MFU "
            f"{100 * self.mfu:.1f} %",
            table([_STAGE_HEAD, *map(_stage_row, range(len(self.stages)), self.stages)]),
            *self._saving_lines(),
            self._spent_text(),
        ]
        if self.traffic:
            head = ("axis", "link", "sent", "time", "exposed")
            lines.append("Sent by one rank in a step")
            lines.append(table([head, *map(_traffic_row, self.traffic)]))
        return "\n".join(lines)

    def _saving_lines(self) -> Iterator[str]:
        if self.rest is not None:
            saving = "; ".join(", ".join(map(str, stage.saving)) for stage in self.stages)
            most, rest = (each.options["recompute"] for each in (self.microbatch, self.rest))
            yield (
                f"Microbatches of {self.microbatches} that each stage runs with recompute={most}, "
                f"the others with {rest}: {saving}"
            )

    def _spent_text(self) -> str:
        times = self.timeline.rank_times()
        # The rank that computes most determines the step; the others wait for it.
        rank = max(range(len(times)), key=lambda each: times[each].compute_us)
        spent = times[rank]
        waits = {f"waits for {axis}": us for axis, us in spent.exposed_us.items() if us}
        parts = {"computes": spent.compute_us, **waits, "bubble": spent.bubble_us}
        shares = ", ".join(f"{name} {time_text(us)}" for name, us in parts.items())
        name = f"Rank {rank} of the pipeline, which computes most" if len(times) > 1 else "A step"
        return (
            f"{name}: {shares}; {time_text(spent.recompute_us)} of recomputation hides no transfer"
        )


_STAGE_HEAD = (
    "stage",
    "layers",
    "in flight",
    "state",
    "gathered",
    "activations",
    "working",
    "total",
    "forward",
    "backward",
)


def _stage_row(number: int, stage: StagePlan) -> tuple[str, ...]:
    sizes = (
        stage.state_bytes,
        stage.gathered_bytes,
        stage.activation_bytes,
        stage.working_bytes,
        stage.total_bytes,
    )
    return (
        str(number),
        str(sum(path != "" for chunk in stage.chunks for path in chunk)),
        str(stage.in_flight),
        *map(bytes_text, sizes),
        time_text(stage.forward_us),
        time_text(stage.backward_us),
    )


def _traffic_row(traffic: AxisTraffic) -> tuple[str, ...]:
    times = (time_text(traffic.time_us), time_text(traffic.exposed_us))
    return (traffic.axis, traffic.link, bytes_text(traffic.sent_bytes), *times)
