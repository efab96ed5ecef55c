"""The result of a graph comparison: plain data, its text for a terminal and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape

Kind = Literal["inserted", "removed", "changed"]
Field = Literal["target", "args", "value", "dtype", "shape", "placement", "recompute", "order"]

_SIGNS: dict[Kind, str] = {"inserted": "+", "removed": "-", "changed": "~"}
_COLOURS: dict[Kind, str] = {"inserted": "green", "removed": "red", "changed": "yellow"}
_MAX_TEXT = 160


@dataclass(frozen=True)
class Change:
    """One property of a node; "" stands for "has none"."""

    field: Field
    before: str
    after: str


@dataclass(frozen=True)
class Entry:
    """One node that differs.

    Attributes:
        kind: what happened to it on the way from the first graph to the second.
        node: its name in the second graph, in the first one if it was removed.
        op: its operator, in the same graph.
        text: the node as one line, in the same graph.
        changes: what changed; empty unless ``kind`` is "changed".
        users: names of the nodes that use it, in the same graph.
        collective: how it communicates ("all_gather", ...), "" if it does not.
    """

    kind: Kind
    node: str
    op: str
    text: str
    changes: tuple[Change, ...] = ()
    users: tuple[str, ...] = ()
    collective: str = ""


@dataclass(frozen=True)
class Summary:
    """A graph that exists on one side only: its operators and collectives, counted."""

    num_nodes: int
    ops: tuple[tuple[str, int], ...]
    collectives: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Section:
    """The differences of one graph; a block that is repeated has one section.

    Attributes:
        name: of the graph, "" for a graph without a name.
        kind: "changed" for a graph that is on both sides.
        count: how many layers use it.
        entries: its nodes that differ, in graph order.
        summary: of a graph that exists on one side only.
    """

    name: str
    kind: Kind
    count: int
    entries: tuple[Entry, ...] = ()
    summary: Summary | None = None


@dataclass(frozen=True)
class GraphDiff:
    """All differences of two sides; ``str()`` is a readable text, ``rich`` prints it in colour.

    Attributes:
        sections: one for each graph that differs.
        calls: (path of the layer, before, after) of calls of regions that changed, "" for none.
    """

    sections: tuple[Section, ...] = ()
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of all sections."""
        return tuple(entry for section in self.sections for entry in section.entries)

    @property
    def is_empty(self) -> bool:
        return not self.sections and not self.calls

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.to_text(markup=True)

    def to_text(self, *, markup: bool = False) -> str:
        """Several lines for a terminal, with the tags of ``rich`` where ``markup`` is set."""
        if self.is_empty:
            return "no difference"
        lines = [line for section in self.sections for line in _section_lines(section)]
        lines += [
            (f"~ call {path or '(model)'}: {old or 'none'} -> {new or 'none'}", "changed")
            for path, old, new in self.calls
        ]
        return "\n".join(_styled(*line) if markup else line[0] for line in lines)

    def to_json(self) -> str:
        """All fields; :meth:`from_json` reads it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> GraphDiff:
        """Inverse of :meth:`to_json`."""
        data = json.loads(text)
        sections = tuple(map(_section_from, data["sections"]))
        return cls(sections, tuple(map(tuple, data["calls"])))


def _section_lines(section: Section) -> Iterator[tuple[str, Kind | None]]:
    repeats = f" x{section.count}" if section.count > 1 else ""
    title = f"{section.name or 'graph'}{repeats}"
    if section.summary is not None:
        verb = "added" if section.kind == "inserted" else "removed"
        yield f"{_SIGNS[section.kind]} {verb} graph {title}", section.kind
        for line in _summary_lines(section.summary):
            yield f"    {line}", section.kind
        return
    yield f"{title}: {_counts(section.entries)}", None
    for entry in section.entries:
        yield from _entry_lines(entry)


def _counts(entries: tuple[Entry, ...]) -> str:
    """``2 inserted (2 collectives), 5 changed``."""
    parts = []
    for kind in _SIGNS:
        group = [entry for entry in entries if entry.kind == kind]
        num_collectives = sum(1 for entry in group if entry.collective)
        if group:
            plural = "" if num_collectives == 1 else "s"
            note = f" ({num_collectives} collective{plural})" if num_collectives else ""
            parts.append(f"{len(group)} {kind}{note}")
    return ", ".join(parts)


def _summary_lines(summary: Summary) -> Iterator[str]:
    yield f"{summary.num_nodes} nodes: {_list_counts(summary.ops)}"
    if summary.collectives:
        yield f"collectives: {_list_counts(summary.collectives)}"


def _list_counts(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts)


def _entry_lines(entry: Entry) -> Iterator[tuple[str, Kind]]:
    mark = f"  << {entry.collective} >>" if entry.collective else ""
    sign = _SIGNS[entry.kind]
    if entry.kind == "changed":
        changes = [f"{c.field} {_show(c.before)} -> {_show(c.after)}" for c in entry.changes]
        yield f"  {sign} %{entry.node} {entry.op}: {'; '.join(changes)}{mark}", entry.kind
        return
    yield f"  {sign} {_shorten(entry.text)}{mark}", entry.kind
    if entry.kind == "inserted" and entry.users:
        yield f"      used by {', '.join(f'%{user}' for user in entry.users)}", entry.kind


def _show(text: str) -> str:
    return _shorten(text) or "none"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _styled(line: str, kind: Kind | None) -> str:
    style = _COLOURS[kind] if kind else "bold"
    return f"[{style}]{escape(line)}[/{style}]"


def _section_from(data: dict[str, Any]) -> Section:
    summary = data["summary"]
    if summary is not None:
        ops, collectives = (tuple(map(tuple, summary[key])) for key in ("ops", "collectives"))
        summary = Summary(summary["num_nodes"], ops, collectives)
    return Section(
        **{**data, "entries": tuple(map(_entry_from, data["entries"])), "summary": summary}
    )


def _entry_from(data: dict[str, Any]) -> Entry:
    changes = tuple(Change(**change) for change in data["changes"])
    return Entry(**{**data, "changes": changes, "users": tuple(data["users"])})
