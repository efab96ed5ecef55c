"""A comparison as one HTML page that works offline: search, filters, folds, details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from sp_compiler.base.placement import legend_of
from sp_compiler.base.units import bytes_text
from sp_compiler.graph_diff.data import KINDS, Entry, Equal, Repeat, Section, Totals
from sp_compiler.graph_diff.folding import folded
from sp_compiler.graph_diff.text import Calls, call_lines, repeat_text, section_title, summary_lines


def page(
    sections: Sequence[Section],
    calls: Calls,
    totals: tuple[Totals, Totals],
    counts: Mapping[str, int],
    context: int | None,
) -> str:
    """The text of the page."""
    environment = Environment(
        # Escaped, because names and source lines are the user's; a missing field is an error, not a
        # blank.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = bytes_text
    environment.tests["equal_run"] = lambda item: isinstance(item, Equal)
    environment.tests["repeat"] = lambda item: isinstance(item, Repeat)
    template = files("sp_compiler.graph_diff").joinpath("diff_page.html")
    # If one side lacks a graph, all its nodes are shown, because none is an unchanged one.
    contexts = [None if section.summary is not None else context for section in sections]
    items = [folded(section.nodes, own) for section, own in zip(sections, contexts, strict=True)]
    # Including graphs that one side lacks, which the page can open.
    entries = [entry for section in sections for entry in section.nodes]
    infos = [info for entry in entries for info in (entry.before, entry.after) if info]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        sections=list(zip(sections, items, strict=True)),
        calls=list(call_lines(calls)),
        totals=totals,
        counts=counts,
        kinds=KINDS,
        title=section_title,
        summary_lines=summary_lines,
        repeat_text=repeat_text,
        row_kinds=_row_kinds,
        legend=legend_of(info.text for info in infos),
    )


def _row_kinds(entry: Entry) -> str:
    """CSS classes of a row, which the filters use."""
    return " ".join(f"k-{kind}" for kind in entry.kinds)
