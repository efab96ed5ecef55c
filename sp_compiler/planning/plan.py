"""The plan as a user has it: the figures of :class:`PlanData`, and the ways to show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_compiler.base.errors import NotCompiledError
from sp_compiler.planning.data import PlanData
from sp_compiler.planning.html import framed, page
from sp_compiler.planning.placement_explanation import Explanation
from sp_compiler.planning.report import report


@dataclass(frozen=True)
class Plan(PlanData):
    """Costs of one training step on one rank; ``print(plan)`` is a table."""

    def explain(self, name: str) -> Explanation:
        """Why a module's parameters are, or are not, sharded, and what the other ways would cost.

        The placements are solved again, once for each way, which takes from tenths of a second to
        seconds.

        >>> print(m.plan.explain("layers.0.attn.o_proj"))

        Args:
            name: of a parameter, or of a module of the model for all parameters inside it. ``*``
                stands for anything between two dots, as in hints.

        Raises:
            ArgumentError: no such name; the message has what is near.
            NotCompiledError: the plan comes from another process.
        """
        if self.explainer is None:
            raise NotCompiledError(
                "explain: this plan was copied from another process; ask sp_compiler.plan(...) here"
            )
        return self.explainer(name)

    def to_html(self, path: str | Path) -> None:
        """Write a page with the step's memory over time and every kept tensor's bytes; it needs no
        network to be read."""
        Path(path).write_text(page(self), encoding="utf-8")

    def to_trace(self, path: str | Path) -> None:
        """Write the simulated step for ``chrome://tracing`` or Perfetto: kernels, what recomputes
        among them, beside the collectives of the tensor-parallel group."""
        self.schedule.to_trace(path)

    def _repr_html_(self) -> str:
        """Show the page of :meth:`to_html` in a notebook."""
        return framed(page(self))

    # A plan never changes, and what explains it holds graphs that would be copied with it.
    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __str__(self) -> str:
        return report(self)
