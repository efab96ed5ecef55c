"""Suggested grids for a model, best first, and why the others lose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.grid_plan.data import GridPlan
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.planning.table_text import table

_SHOWN = 8


@dataclass(frozen=True)
class Rejected:
    """A grid that is not among the plans; ``reason`` says why."""

    grid: GridSizes
    reason: str


@dataclass(frozen=True)
class Suggestions(Sequence[GridPlan]):
    """Result of :func:`sp_compiler.suggest`: a sequence of plans; ``print`` shows a table.

    Attributes:
        plans: the best setting of each grid that fits, fastest first.
        rejected: the other grids, each with the reason.
        memory_bytes: memory limit of one device.
    """

    plans: tuple[GridPlan, ...]
    rejected: tuple[Rejected, ...]
    memory_bytes: int

    @overload
    def __getitem__(self, index: int) -> GridPlan: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[GridPlan, ...]: ...

    def __getitem__(self, index: int | slice) -> GridPlan | tuple[GridPlan, ...]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[GridPlan]:
        return iter(self.plans)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the values of the table, in bytes and microseconds."""
        return {
            "memory_bytes": self.memory_bytes,
            "plans": [
                {
                    **asdict(plan.grid),
                    # A single stage runs no schedule, whatever the plan was made with.
                    "schedule": plan.schedule if plan.grid.pp > 1 else None,
                    "stages_per_rank": plan.stages_per_rank,
                    "microbatches": plan.microbatches,
                    "recompute": plan.microbatch.options["recompute"],
                    "recompute_rest": plan.rest and plan.rest.options["recompute"],
                    # The limit per stage; with it a pipeline makes the same choice.
                    "memory": plan.memory_bytes,
                    "step_us": plan.step_us,
                    "mfu": plan.mfu,
                    "total_bytes": plan.total_bytes,
                    "loses": _loss(plan, self.plans[0]),
                }
                for plan in self.plans
            ],
            "rejected": [{**asdict(each.grid), "reason": each.reason} for each in self.rejected],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        head = ("grid", "schedule", "recompute", "step", "MFU", "memory", "compared to the first")
        rows = [
            (
                str(plan.grid),
                schedule_text(plan),
                recompute_text(plan),
                time_text(plan.step_us),
                f"{100 * plan.mfu:.1f} %",
                bytes_text(plan.total_bytes),
                _loss(plan, self.plans[0]),
            )
            for plan in self.plans
        ]
        lines = [table([head, *rows])] if rows else []
        if not rows:
            lines.append(f"No grid fits {bytes_text(self.memory_bytes)} per device.")
        if self.rejected:
            others = [(str(each.grid), each.reason) for each in self.rejected[:_SHOWN]]
            lines += ["", "Other grids", table(others)]
            if len(self.rejected) > _SHOWN:
                lines.append(f"  and {len(self.rejected) - _SHOWN} more, in .rejected")
        return "\n".join(lines)


def schedule_text(plan: GridPlan) -> str:
    """Return the schedule as text."""
    # Otherwise the default would be shown, and look like a choice of the search.
    if plan.grid.pp == 1:
        return "no stages"
    chunks = f" x {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    return f"{plan.schedule}{chunks}"


def recompute_text(plan: GridPlan) -> str:
    """Return the recompute setting as text; for two settings, with the share of microbatches."""
    most = str(plan.microbatch.options["recompute"])
    if plan.rest is None:
        return most
    return f"{most} for {100 * _share(plan):.0f} %, else {plan.rest.options['recompute']}"


def _share(plan: GridPlan) -> float:
    """Return the share of microbatches that run with ``recompute``, the mean over stages."""
    saving = [number for stage in plan.stages for number in stage.saving]
    return sum(saving) / len(saving) / plan.microbatches


def _parts_us(plan: GridPlan) -> dict[str, float]:
    """Return the time of a step by its parts, which add up to it."""
    work, ranks = plan.microbatch.work, plan.grid.pp
    if plan.rest is not None:
        share = _share(plan)
        work = work.times(share) + plan.rest.work.times(1 - share)
    # As if stages were equal: differences between them show as waiting time.
    exposed_us = {each.axis: each.exposed_us for each in plan.traffic}
    per_rank = plan.microbatches / ranks
    parts = {
        "arithmetic": per_rank * (work.compute_us - work.recompute_us),
        "recompute": per_rank * work.recompute_us,
        "tp communication": per_rank * (work.communication_us - work.hidden_us),
        "data parallel communication": sum(
            time_us for axis, time_us in exposed_us.items() if axis.startswith("dp")
        ),
    }
    # As a difference, so that the parts add up; it includes uneven stages, messages and the bubble.
    return {**parts, "waiting in the pipeline": plan.step_us - sum(parts.values())}


def _loss(plan: GridPlan, best: GridPlan) -> str:
    """Return what the step loses against ``best``, the largest part first, as text."""
    if plan is best:
        return ""
    own, others = _parts_us(plan), _parts_us(best)
    slower = 100 * (plan.step_us / best.step_us - 1)
    # Gains are listed as well, or the times would not add up. At most three causes, each at least a
    # thousandth of the step: a reader wants to know what to change.
    more_us = {name: own[name] - others[name] for name in own}
    largest = sorted(more_us, key=lambda name: abs(more_us[name]), reverse=True)[:3]
    causes = [
        f"{name} {'+' if more_us[name] > 0 else '-'}{time_text(abs(more_us[name]))}"
        for name in largest
        if abs(more_us[name]) > 0.001 * best.step_us
    ]
    return f"{slower:.1f} % slower" + (f": {', '.join(causes)}" if causes else "")
