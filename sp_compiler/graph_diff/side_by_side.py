"""A comparison as two columns in colour, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sp_compiler.base.placement import legend_of
from sp_compiler.graph_diff.data import Entry, Equal, Item, Kind, NodeInfo, Repeat, Section, Totals
from sp_compiler.graph_diff.folding import folded
from sp_compiler.graph_diff.text import (
    Calls,
    call_lines,
    node_texts,
    repeat_text,
    section_title,
    shortened,
    summary_lines,
)

STYLES: dict[Kind, str] = {
    "unchanged": "dim",
    "replaced": "yellow",
    "shape": "cyan",
    "placement": "magenta",
    "tagged": "blue",
    "moved": "bright_yellow",
    "inserted": "green",
    "collective": "bold green",
    "removed": "red",
}


def side_by_side(
    sections: Sequence[Section], calls: Calls, totals: tuple[Totals, Totals], context: int | None
) -> Group:
    """Return one table with the totals, and one per graph that differs."""
    # In words, because an empty table looks like a failure.
    if not sections and not calls:
        return Group(Text("no difference"))
    heads = _columns()
    heads.add_row("", *(Text(side.name, style="bold") for side in totals))
    heads.add_row("", *map(str, totals))
    return Group(
        heads,
        *(part for section in sections for part in _section(section, context)),
        *(Text(line, style="yellow") for line in call_lines(calls)),
        *(Text(line, style="dim") for line in legend_of(node_texts(sections))),
    )


def _section(section: Section, context: int | None) -> Iterator[RenderableType]:
    yield Text(f"\n{section_title(section)}", style="bold")
    if section.summary is not None:
        style = STYLES["inserted" if section.kind == "inserted" else "removed"]
        yield from (Text(f"  {line}", style=style) for line in summary_lines(section.summary))
        return
    table = _columns()
    for item in folded(section.nodes, context):
        for row in _rows(item):
            table.add_row(*row)
    yield table


def _columns() -> Table:
    # Without a box, whose lines would take a fifth of a narrow terminal.
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    return table


def _rows(item: Item) -> Iterator[tuple[Text, Text, Text]]:
    if isinstance(item, Repeat):
        for part in item.first:
            yield from _rows(part)
        yield _note(repeat_text(item))
    elif isinstance(item, Equal):
        yield _note(f"{len(item.entries)} equal")
    else:
        yield _row(item)


def _note(text: str) -> tuple[Text, Text, Text]:
    return Text(""), Text(f"... {text}", style="dim italic"), Text("")


def _row(entry: Entry) -> tuple[Text, Text, Text]:
    style = STYLES[entry.kinds[0]]
    mark = {"unchanged": " ", "changed": "~", "inserted": "+", "removed": "-"}[entry.kind]
    # The text of a node shows all its properties except its position.
    moves = [change.after for change in entry.changes if change.field == "order"]
    order = "".join(f"  (order: {after or 'none'})" for after in moves)
    after = _cell(entry.after, style).append(order)
    return Text(mark, style=style), _cell(entry.before, style), after


def _cell(node: NodeInfo | None, style: str) -> Text:
    if node is None:
        return Text("")
    text = Text(shortened(node.text), style=style)
    return text.append(f"  << {node.collective} >>", style="bold") if node.collective else text
