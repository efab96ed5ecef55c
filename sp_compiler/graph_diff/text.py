"""A comparison as text: one line per node that differs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import TypeAlias

from sp_compiler.graph_diff.data import Entry, Equal, Fate, Repeat, Section, Summary
from sp_compiler.graph_diff.folding import folded

SIGNS: dict[Fate, str] = {"inserted": "+", "removed": "-", "changed": "~"}
COLOURS: dict[Fate, str] = {"inserted": "green", "removed": "red", "changed": "yellow"}
_MAX_TEXT = 160

Line: TypeAlias = tuple[str, Fate | None]
"""A line, and the fate of the node that it shows; ``None`` for a title."""
Calls: TypeAlias = Sequence[tuple[str, str, str]]


def lines(sections: Sequence[Section], calls: Calls) -> list[Line]:
    """The differences of all graphs, then those of the calls."""
    of_graphs = [line for section in sections for line in _section_lines(section)]
    return [*of_graphs, *((line, "changed") for line in call_lines(calls))]


def call_lines(calls: Calls) -> Iterator[str]:
    """``~ call h.1: A -> B``, with only arguments that differ; equal changes are shown once."""
    for _, equal in itertools.groupby(calls, key=_without_numbers):
        (path, before, after), *others = equal
        old, new = map(_show, _folded_arguments(before, after))
        yield f"~ call {path or '(model)'}: {old} -> {new}"
        if others:
            yield f"    the same {_times(len(others))}, to {others[-1][0]}"


def _without_numbers(call: tuple[str, str, str]) -> tuple[str, ...]:
    # Layers of one kind have equal arguments except for the number of the layer.
    return tuple(re.sub(r"\d+", "#", part) for part in call)


def _folded_arguments(before: str, after: str) -> tuple[str, str]:
    """``A(..., x)`` and ``A(..., y)`` for calls of one region that differ only in the last."""
    name, _, old = before.removesuffix(")").partition("(")
    other, _, new = after.removesuffix(")").partition("(")
    if name != other or not (old and new):
        return before, after
    parts = old.split(", "), new.split(", ")
    folds: tuple[list[str], list[str]] = ([], [])
    for equal, *spans in _equal_spans(*parts):
        for fold, own, (start, stop) in zip(folds, parts, spans, strict=True):
            fold += ["..."] if equal else own[start:stop]
    return f"{name}({', '.join(folds[0])})", f"{name}({', '.join(folds[1])})"


def _equal_spans(
    old: Sequence[str], new: Sequence[str]
) -> Iterator[tuple[bool, tuple[int, int], tuple[int, int]]]:
    """For each run of arguments: whether it is equal, and its start and end on each side."""
    if len(old) == len(new):  # by position, because two swapped arguments are not an insertion
        pairs = enumerate(zip(old, new, strict=True))
        for equal, run in itertools.groupby(pairs, key=lambda pair: pair[1][0] == pair[1][1]):
            places = [place for place, _ in run]
            span = (places[0], places[-1] + 1)
            yield equal, span, span
        return
    for tag, *ends in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        yield tag == "equal", (ends[0], ends[1]), (ends[2], ends[3])


def _times(count: int) -> str:
    return "once more" if count == 1 else f"{count} times more"


def section_title(section: Section) -> str:
    """``Block x48: 2 inserted (2 collectives), 5 changed``, or ``+ added graph Block x48``."""
    repeats = f" x{section.count}" if section.count > 1 else ""
    title = f"{section.name or 'graph'}{repeats}"
    if section.summary is None:
        return f"{title}: {_counts(section.entries)}"
    verb = "added" if section.kind == "inserted" else "removed"
    return f"{SIGNS[section.kind]} {verb} graph {title}"


def node_texts(sections: Sequence[Section]) -> Iterator[str]:
    """Return the text of a node on either side."""
    # For a graph that one side lacks, only counts are shown.
    shown = [entry for section in sections if section.summary is None for entry in section.nodes]
    yield from (node.text for entry in shown for node in (entry.before, entry.after) if node)


def repeat_text(repeat: Repeat) -> str:
    """Return the text for a repetition: ``the same 12 times more, to %linear_95``."""
    last = repeat.others[-1][-1]
    end = last.entries[-1] if isinstance(last, Equal) else last
    return f"the same {_times(len(repeat.others))}, to %{end.node}"


def _section_lines(section: Section) -> Iterator[Line]:
    if section.summary is not None:
        yield section_title(section), section.kind
        for line in summary_lines(section.summary):
            yield f"    {line}", section.kind
        return
    yield section_title(section), None
    for item in folded(section.entries, context=None):
        for entry in item.first if isinstance(item, Repeat) else (item,):
            # ``section.entries`` has only differing nodes, so none is folded as equal.
            if isinstance(entry, Entry):
                yield from _entry_lines(entry)
        if isinstance(item, Repeat):
            yield f"    {repeat_text(item)}", None


def _counts(entries: tuple[Entry, ...]) -> str:
    """``3 inserted (1 input, 2 collectives), 5 changed``."""
    parts = []
    for kind in SIGNS:
        group = [entry for entry in entries if entry.kind == kind]
        # Totals do not count inputs: without this note, lists and totals would seem inconsistent.
        num_inputs = sum(entry.op.startswith("placeholder[") for entry in group)
        counted = {"input": 0 if kind == "changed" else num_inputs}
        counted["collective"] = sum(1 for entry in group if entry.collective)
        notes = [f"{n} {what}{'' if n == 1 else 's'}" for what, n in counted.items() if n]
        if group:
            parts.append(f"{len(group)} {kind}" + (f" ({', '.join(notes)})" if notes else ""))
    return ", ".join(parts)


def summary_lines(summary: Summary) -> Iterator[str]:
    """Operators and collectives of a graph that one side lacks."""
    yield f"{summary.num_nodes} nodes: {_list_counts(summary.ops)}"
    if summary.collectives:
        yield f"collectives: {_list_counts(summary.collectives)}"


def _list_counts(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts)


def _entry_lines(entry: Entry) -> Iterator[Line]:
    mark = f"  << {entry.collective} >>" if entry.collective else ""
    sign = SIGNS[entry.kind]
    if entry.kind == "changed":
        changes = [f"{c.field} {_show(c.before)} -> {_show(c.after)}" for c in entry.changes]
        yield f"  {sign} %{entry.node} {entry.op}: {'; '.join(changes)}{mark}", entry.kind
        return
    yield f"  {sign} {shortened(entry.text)}{mark}", entry.kind
    if entry.kind == "inserted" and entry.users:
        yield f"      used by {', '.join(f'%{user}' for user in entry.users)}", entry.kind


def _show(text: str) -> str:
    return shortened(text) or "none"


def shortened(text: str) -> str:
    """Return ``text``, shortened if it is very long."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
