"""The result of a graph comparison, and methods to show it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import legend_of
from sp_compiler.graph_diff import text, unified
from sp_compiler.graph_diff.data import (
    KINDS,
    Change,
    Entry,
    NodeInfo,
    Section,
    Summary,
    Totals,
)
from sp_compiler.graph_diff.page import page
from sp_compiler.graph_diff.side_by_side import side_by_side
from sp_compiler.ops.registry import Collective
from sp_compiler.planning.html import framed


@dataclass(frozen=True)
class GraphDiff:
    """All differences between two sides; ``str()`` is readable text, ``rich`` prints it in colour.

    Attributes:
        sections: one per graph that differs.
        calls: (path of the layer, region before, region after) of each call that changed; "" if
            there is none.
        before: totals of the first side.
        after: totals of the second side.
    """

    sections: tuple[Section, ...] = ()
    calls: tuple[tuple[str, str, str], ...] = ()
    before: Totals = field(default_factory=Totals)
    after: Totals = field(default_factory=Totals)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of all sections."""
        return tuple(entry for section in self.sections for entry in section.entries)

    @property
    def is_empty(self) -> bool:
        """Whether there is no difference; exactly then :attr:`counts` is empty."""
        return not self.sections and not self.calls

    @property
    def counts(self) -> dict[str, int]:
        """Number of nodes of each kind, in the graphs that differ, each graph counted once, and
        ``"calls"``, the number of calls that changed.

        A node with several changed properties counts in several kinds.
        """
        kinds: Counter[str] = Counter(
            kind for section in self.sections for entry in section.nodes for kind in entry.kinds
        )
        kinds["calls"] = len(self.calls)
        return {kind: kinds[kind] for kind in (*KINDS, "calls") if kinds[kind]}

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.to_text(markup=True)

    def to_text(self, *, markup: bool = False) -> str:
        """One line per node that differs; with ``markup``, styled by the tags of ``rich``."""
        # In words, because an empty text could be a failure to print.
        lines = text.lines(self.sections, self.calls) or [("no difference", None)]
        # ``rich`` would read brackets in shapes as tags, so lines for it are escaped.
        legend = legend_of(line for line, _ in lines)
        if not markup or self.is_empty:
            return "\n".join([*(line for line, _ in lines), *legend])
        styled = [(line, text.COLOURS[kind] if kind else "bold") for line, kind in lines]
        styled += [(line, "dim") for line in legend]
        return "\n".join(f"[{style}]{escape(line)}[/{style}]" for line, style in styled)

    def to_unified(self, context: int | None = 3) -> str:
        """Text like that of ``diff -u``: totals, then each graph with ``-`` and ``+`` lines.

        Args:
            context: number of unchanged nodes to show on either side of a change, ``None`` for all;
                the others, and differences that repeat, are folded.
        """
        lines = [*unified.lines(self.sections, self.calls, (self.before, self.after), context)]
        return "\n".join([*lines, *legend_of(lines)])

    def side_by_side(self, context: int | None = 3) -> Group:
        """Both sides in columns, for ``rich.print``; ``context`` as for :meth:`to_unified`."""
        return side_by_side(self.sections, self.calls, (self.before, self.after), context)

    def to_html(self, path: str | Path, context: int | None = 3) -> None:
        """Write a self-contained HTML page with search and filters, which works offline.

        Each row opens to show shape, placement, bytes, module and source line. ``context`` is as
        for :meth:`to_unified`; folded nodes can be opened.
        """
        Path(path).write_text(self._page(context), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Show the page of :meth:`to_html` in a notebook."""
        return framed(self._page(3))

    def _page(self, context: int | None) -> str:
        totals = (self.before, self.after)
        return page(self.sections, self.calls, totals, self.counts, context)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with the kinds of each node, which is all that :meth:`from_json` needs."""
        data = asdict(self)
        # ``asdict`` leaves out derived properties, but readers of the JSON need them.
        for section, own in zip(data["sections"], self.sections, strict=True):
            for entry, node in zip(section["nodes"], own.nodes, strict=True):
                entry["kinds"] = list(node.kinds)
        return {**data, "counts": self.counts}

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON; :meth:`from_json` reads it."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> GraphDiff:
        """Inverse of :meth:`to_json`.

        Raises:
            ArgumentError: ``text`` is something else.
        """
        try:
            data = json.loads(text)
            sections = tuple(map(_section_from, data["sections"]))
            calls = tuple(map(tuple, data["calls"]))
            return cls(sections, calls, _totals_from(data["before"]), _totals_from(data["after"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"the text is not a graph diff as written by GraphDiff.to_json ({error!r})"
            ) from error


def _section_from(data: dict[str, Any]) -> Section:
    summary = data["summary"]
    if summary is not None:
        ops, collectives = (tuple(map(tuple, summary[key])) for key in ("ops", "collectives"))
        summary = Summary(summary["num_nodes"], ops, collectives)
    # JSON has only lists; frozen dataclasses that are compared have tuples.
    return Section(**{**data, "nodes": tuple(map(_entry_from, data["nodes"])), "summary": summary})


def _entry_from(data: dict[str, Any]) -> Entry:
    changes = tuple(Change(**change) for change in data["changes"])
    return Entry(data["kind"], _info_from(data["before"]), _info_from(data["after"]), changes)


def _info_from(data: dict[str, Any] | None) -> NodeInfo | None:
    return None if data is None else NodeInfo(**{**data, "users": tuple(data["users"])})


def _totals_from(data: dict[str, Any]) -> Totals:
    collectives = tuple(Collective(**item) for item in data["collectives"])
    return Totals(**{**data, "collectives": collectives})
