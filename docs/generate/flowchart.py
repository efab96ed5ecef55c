"""Flowcharts of the pages as HTML: a browser would need megabytes of scripts to draw Mermaid's."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import Any

from pymdownx.superfences import SuperFencesException

_NODE = re.compile(r'(\w+)(?:\(\[(.+)\]\)|\["?(.+?)"?\])?')
_ARROWS = {" --> ": "→", " -.-> ": "⇢"}


@dataclass
class _Group:
    """A subgraph: chains of node names, each with its arrow."""

    title: str
    chains: list[tuple[str, list[str]]] = field(default_factory=list)


def flowchart(source: str, *_: Any, **__: Any) -> str:
    """Return chains of boxes, which break into lines as text does; groups stand in their chain.

    Raises:
        SuperFencesException: the text is more than chains in one level of subgraphs. Any other
            class would be caught, and the page would show the text.
    """
    labels: dict[str, str] = {}
    groups = {"": _Group("")}
    inside = ""
    for line in source.strip().splitlines()[1:]:
        words = line.strip()
        if words.startswith("subgraph "):
            inside, title = _node(words.removeprefix("subgraph "))
            groups[inside] = _Group(title)
        elif words == "end":
            inside = ""
        else:
            arrow = next((arrow for arrow in _ARROWS if arrow in words), None)
            if arrow is None:
                raise SuperFencesException(f"a line of a flowchart is no chain: {words}")
            nodes = [_node(text) for text in words.split(arrow)]
            labels |= {name: label for name, label in nodes if label or name not in labels}
            _append(groups[inside].chains, arrow, [name for name, _ in nodes])
    return f'<div class="flowchart">{_chains(groups[""], groups, labels)}</div>'


def _node(text: str) -> tuple[str, str]:
    """Return the name and the label of a node, or of several with ``&`` between them."""
    match = _NODE.fullmatch(text.strip())
    return (match[1], match[2] or match[3] or "") if match else (text.strip(), "")


def _append(chains: list[tuple[str, list[str]]], arrow: str, names: list[str]) -> None:
    if chains and chains[-1][0] == arrow and chains[-1][1][-1] == names[0]:
        chains[-1][1].extend(names[1:])
    else:
        chains.append((arrow, names))


def _chains(group: _Group, groups: dict[str, _Group], labels: dict[str, str]) -> str:
    lines = []
    for arrow, names in group.chains:
        # A dotted arrow refers to groups that stand elsewhere.
        boxes = [
            f"<fieldset><legend>{html.escape(groups[name].title)}</legend>"
            f"{_chains(groups[name], groups, labels)}</fieldset>"
            if name in groups and arrow == " --> "
            else f"<span>{_text(name, groups, labels)}</span>"
            for name in names
        ]
        lines.append(f"<div>{f'<i>{_ARROWS[arrow]}</i>'.join(boxes)}</div>")
    return "".join(lines)


def _text(names: str, groups: dict[str, _Group], labels: dict[str, str]) -> str:
    """Return the labels of nodes; line breaks are markup."""
    texts = [
        groups[name].title if name in groups else labels.get(name) or name
        for name in names.split(" & ")
    ]
    return "<br>".join(html.escape(part) for part in "; ".join(texts).split("<br>"))
