"""What differs between two graphs, programs or stages of a compilation.

Graphs are compared node by node, after :mod:`sp_compiler.graph_diff.align` has found which node
is which; other names and other ways to write the same call are no difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.graph_diff.align import Alignment
from sp_compiler.graph_diff.report import Change, Entry, Field, GraphDiff, Kind, Section, Summary
from sp_compiler.graph_diff.subsequences import longest_increasing
from sp_compiler.ir.op_traits import collective_of, is_collective
from sp_compiler.ir.program import Program
from sp_compiler.ir.snapshot import FORWARD, Snapshot, region_of
from sp_compiler.ir.text import (
    meta_text,
    render_arguments,
    render_dtype,
    render_node,
    render_target,
)

Comparable: TypeAlias = Graph | GraphModule | Program | Snapshot


def diff(a: Comparable, b: Comparable) -> GraphDiff:
    """Changes that make ``b`` of ``a``; none where both are the same graph.

    Regions are matched by name; ``"Block"`` matches ``"Block.forward"`` where forward and backward
    are apart on one side only, and ``"Block.backward"`` is then shown as an added graph. A single
    graph is compared with a stage of one region, whose forward it is taken to be.

    Raises:
        ArgumentError: anything else, or a single graph against a stage of several regions.
    """
    first, second = _as_stage(a, b), _as_stage(b, a)
    sections = []
    for name, old, new in _pairs(first.graphs, second.graphs):
        count = max(1, len(first.paths(name)), len(second.paths(name)))
        section = _section(name, count, old, new)
        if section is not None:
            sections.append(section)
    return GraphDiff(tuple(sections), tuple(_call_changes(first, second)))


def _as_stage(value: Any, other: Any) -> Snapshot:
    if isinstance(value, Snapshot):
        return value
    if isinstance(value, Program):
        return Snapshot.of_program("", value)
    graph = value.graph if isinstance(value, GraphModule) else value
    if not isinstance(graph, Graph):
        raise ArgumentError(
            f"cannot compare a {type(value).__name__}; "
            "expected a Graph, GraphModule, Program or Snapshot"
        )
    if not isinstance(other, Snapshot | Program):
        return Snapshot("", {"": graph})
    stage = _as_stage(other, None)
    regions = list(dict.fromkeys(map(region_of, stage.graphs)))
    if len(regions) != 1:
        raise ArgumentError(
            f"cannot compare a single graph with {len(regions)} regions ({', '.join(regions)}); "
            "compare it with one of their graphs, or give the full stage or program"
        )
    return Snapshot("", {regions[0]: graph}, stage.calls)


def _pairs(
    first: dict[str, Graph], second: dict[str, Graph]
) -> Iterator[tuple[str, Graph | None, Graph | None]]:
    """Name and both graphs of each region, None where a side has none."""
    rest = dict(second)
    # Before the split into forward and backward a region has one graph, which became the forward.
    for name, graph in first.items():
        candidates = (name, f"{name}{FORWARD}", name.removesuffix(FORWARD))
        match = next((candidate for candidate in candidates if candidate in rest), name)
        yield match, graph, rest.pop(match, None)
    for name, graph in rest.items():
        yield name, None, graph


def _section(name: str, count: int, old: Graph | None, new: Graph | None) -> Section | None:
    if old is None or new is None:
        kind: Kind = "removed" if new is None else "inserted"
        return Section(name, kind, count, summary=_summary(new or old))
    entries = tuple(_entries(Alignment(old, new)))
    return Section(name, "changed", count, entries) if entries else None


def _summary(graph: Graph | None) -> Summary:
    assert graph is not None
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    ops = Counter(render_target(node) for node in calls)
    collectives = Counter(kind for node in calls if (kind := _collective(node)))
    return Summary(len(calls), tuple(ops.most_common()), tuple(collectives.most_common()))


def _call_changes(first: Snapshot, second: Snapshot) -> Iterator[tuple[str, str, str]]:
    """(path, before, after) of calls that only one side has, or whose arguments changed."""
    if first.calls == second.calls:
        wirings = zip(first.calls, first.wiring, second.wiring, strict=False)
        yield from ((path, old, new) for (path, _), old, new in wirings if old != new)
        return
    matcher = SequenceMatcher(None, first.calls, second.calls, autojunk=False)
    for tag, start, stop, other, end in matcher.get_opcodes():
        old, new = first.calls[start:stop], second.calls[other:end]
        if tag == "replace" and [path for path, _ in old] == [path for path, _ in new]:
            yield from ((path, x, y) for (path, x), (_, y) in zip(old, new, strict=True))
        elif tag != "equal":
            yield from ((path, region, "") for path, region in old)
            yield from ((path, "", region) for path, region in new)


def _entries(alignment: Alignment) -> Iterator[Entry]:
    """In the order of the second graph; a removed node stands before what followed it."""
    moves = _moves(alignment)
    inserted = set(alignment.inserted)
    removed = _removed_before(alignment)
    for node in (*alignment.after, None):  # None: removed from the end
        for gone in removed.get(node, ()):
            yield _entry("removed", gone)
        if node in inserted:
            yield _entry("inserted", node)
        elif node in alignment.back:
            changes = (*_changes(alignment, alignment.back[node], node), *moves.get(node, ()))
            if changes:
                yield _entry("changed", node, changes)


def _entry(kind: Kind, node: Node, changes: tuple[Change, ...] = ()) -> Entry:
    users = tuple(user.name for user in node.users)
    op, text = render_target(node), render_node(node)
    return Entry(kind, node.name, op, text, changes, users, _collective(node))


def _collective(node: Node) -> str:
    if not is_collective(node):
        return ""
    return collective_of(node) or render_target(node).rpartition(".")[2]


def _removed_before(alignment: Alignment) -> dict[Node | None, list[Node]]:
    """Removed nodes by the node of the second graph that followed them."""
    removed_before: dict[Node | None, list[Node]] = defaultdict(list)
    waiting: list[Node] = []
    for node in alignment.before:
        if node not in alignment.forth:
            waiting.append(node)
        elif waiting:
            removed_before[alignment.forth[node]] += waiting
            waiting = []
    removed_before[None] += waiting
    return removed_before


def _moves(alignment: Alignment) -> dict[Node, tuple[Change, ...]]:
    """Matched nodes outside a longest run that both graphs have in the same order."""
    position = {node: index for index, node in enumerate(alignment.after)}
    matched = [node for node in alignment.before if node in alignment.forth]
    # What moved is least if the most that can stay is said to have stayed.
    kept = longest_increasing([position[alignment.forth[node]] for node in matched])
    order = sorted((alignment.forth[node] for node in matched), key=position.__getitem__)
    previous_after = dict(zip(order, [None, *order], strict=False))
    moves: dict[Node, tuple[Change, ...]] = {}
    for index, node in enumerate(matched):
        if index not in kept:
            new = alignment.forth[node]
            old_place = _place(matched[index - 1] if index else None)
            moves[new] = (Change("order", old_place, _place(previous_after[new])),)
    return moves


def _place(previous: Node | None) -> str:
    return f"after %{previous.name}" if previous is not None else "first"


def _changes(alignment: Alignment, old: Node, new: Node) -> Iterator[Change]:
    targets = render_target(old), _new_target(alignment, old, new)
    if targets[0] != targets[1] and old.op != "placeholder":
        yield Change("target", *targets)
    if not alignment.same_arguments(old, new):
        yield Change("args", _arguments_text(old), _arguments_text(new))
    yield from _value_changes(old, new)
    placements = meta_text(old, "placement"), meta_text(new, "placement")
    if placements[0] != placements[1]:
        yield Change("placement", *placements)
    tags = meta_text(old, "recompute"), _new_tags(alignment, old, new)
    if tags[0] != tags[1]:
        yield Change("recompute", *tags)


def _new_target(alignment: Alignment, old: Node, new: Node) -> str:
    """Name what the operator became: one, or several for an expansion."""
    names = [render_target(node) for node in alignment.expansions.get(old, [new])]
    return " + ".join(dict.fromkeys(names))


def _new_tags(alignment: Alignment, old: Node, new: Node) -> str:
    """Of all operators that the old one became."""
    tags = [meta_text(node, "recompute") for node in alignment.expansions.get(old, [new])]
    return " + ".join(dict.fromkeys(tag for tag in tags if tag))


def _arguments_text(node: Node) -> str:
    return f"({render_arguments(node, lambda value: f'%{value.name}')})"


def _value_changes(old: Node, new: Node) -> Iterator[Change]:
    before, after = old.meta.get("val"), new.meta.get("val")
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        pairs: dict[Field, tuple[str, str]] = {
            "dtype": (render_dtype(before.dtype), render_dtype(after.dtype)),
            "shape": (str(list(before.shape)), str(list(after.shape))),
        }
    else:
        pairs = {"value": (meta_text(old, "val"), meta_text(new, "val"))}
    for field, (first, second) in pairs.items():
        if first != second:
            yield Change(field, first, second)
