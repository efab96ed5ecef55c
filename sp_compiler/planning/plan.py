"""The plan that a user gets: the values of :class:`PlanData`, and methods to show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_compiler.base.errors import NotCompiledError
from sp_compiler.planning.data import PlanData
from sp_compiler.planning.figures import draw, save
from sp_compiler.planning.html import framed, page
from sp_compiler.planning.placement_explanation import Explanation
from sp_compiler.planning.report import report


@dataclass(frozen=True)
class Plan(PlanData):
    """Costs of one training step on one rank; ``print(plan)`` shows tables."""

    def explain(self, name: str) -> Explanation:
        """Explain why a module's parameters are sharded or not, and what alternatives would cost.

        Solves the placement problem again for each alternative, which takes tenths of a second to
        seconds.

        >>> print(m.plan.explain("layers.0.attn.o_proj"))

        Args:
            name: name of a parameter, or of a module for all parameters inside it. ``*`` matches
                anything between two dots, as in hints.

        Raises:
            ArgumentError: no such name; the message suggests similar names.
            NotCompiledError: the plan comes from another process.
        """
        if self.explainer is None:
            raise NotCompiledError(
                "explain: this plan comes from another process; call sp_compiler.plan(...) here"
            )
        return self.explainer(name)

    def to_html(self, path: str | Path) -> None:
        """Write an HTML page with the step's memory over time and the bytes of every saved tensor;
        it works offline."""
        Path(path).write_text(page(self), encoding="utf-8")

    def to_trace(self, path: str | Path) -> None:
        """Write the simulated step for ``chrome://tracing`` or Perfetto: kernels, with
        recomputation marked, and the collectives of the tensor-parallel group."""
        self.schedule.to_trace(path)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the memory over a step with its limit, the timeline of a layer, and which rank has
        which part of its weights.

        The limit is ``device_memory``, or ``memory_budget`` plus parameters, gradients and
        optimizer state. The layer is the most frequent one. Needs matplotlib
        (``sp-compiler[plot]``).

        Args:
            path: optional file to write; its suffix determines the format (".png", ".svg", ".pdf").

        Returns:
            A ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        figure = draw(self)
        save(figure, path)
        return figure

    def _repr_html_(self) -> str:
        """Show the page of :meth:`to_html` in a notebook."""
        return framed(page(self))

    # A plan never changes, and its explainer holds graphs that would be copied with it.
    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __str__(self) -> str:
        return report(self)
