"""A comparison in the format of ``diff -u``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sp_compiler.graph_diff.data import Entry, Equal, Item, Repeat, Section, Totals
from sp_compiler.graph_diff.folding import folded
from sp_compiler.graph_diff.text import (
    Calls,
    call_lines,
    repeat_text,
    section_title,
    shortened,
    summary_lines,
)


def lines(
    sections: Sequence[Section], calls: Calls, totals: tuple[Totals, Totals], context: int | None
) -> Iterator[str]:
    """Totals of both sides, then each graph that differs, then the calls."""
    for mark, side in zip(("---", "+++"), totals, strict=True):
        yield f"{mark} {side.name}: {side}"
    for section in sections:
        yield f"@@ {section_title(section)} @@"
        # If a graph is on one side only, its lines have no counterparts.
        if section.summary is not None:
            sign = "+" if section.kind == "inserted" else "-"
            yield from (f"{sign}  {line}" for line in summary_lines(section.summary))
            continue
        for item in folded(section.nodes, context):
            yield from _item_lines(item)
    yield from call_lines(calls)


def _item_lines(item: Item) -> Iterator[str]:
    if isinstance(item, Repeat):
        for part in item.first:
            yield from _item_lines(part)
        yield f"      ... {repeat_text(item)}"
    elif isinstance(item, Equal):
        yield f"      ... {len(item.entries)} equal"
    else:
        yield from _entry_lines(item)


def _entry_lines(entry: Entry) -> Iterator[str]:
    if entry.kind == "unchanged":
        yield f"   {shortened(entry.text)}"
        return
    # A node's line may be the same although the node changed: it moved, or an operand's name now
    # means another value.
    for mark, node in (("-", entry.before), ("+", entry.after)):
        if node is not None:
            communicates = f"  << {node.collective} >>" if node.collective else ""
            moved = [change for change in entry.changes if change.field == "order"]
            place = f"  ({moved[0].before if mark == '-' else moved[0].after})" if moved else ""
            yield f"{mark}  {shortened(node.text)}{communicates}{place}"
