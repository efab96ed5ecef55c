"""Differences between two graphs, programs or stages of a compilation.

Graphs are compared node by node, after :mod:`sp_compiler.graph_diff.align` has matched their nodes;
different names and different forms of the same call do not count.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import I
from sp_compiler.graph_diff.align import Alignment
from sp_compiler.graph_diff.comparable import FLAT, snapshot_of
from sp_compiler.graph_diff.data import Change, Entry, Fate, Field, Section, Summary
from sp_compiler.graph_diff.node_info import collective_text, node_info
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.graph_diff.subsequences import longest_increasing
from sp_compiler.graph_diff.totals import totals
from sp_compiler.ir.program import Program
from sp_compiler.ir.snapshot import FORWARD, Snapshot, Stages, region_of
from sp_compiler.ir.text import meta_text, render_arguments, render_dtype, render_target
from sp_compiler.trace.arguments import ExampleInputs

Comparable: TypeAlias = (
    nn.Module | Graph | GraphModule | ExportedProgram | Program | Snapshot | Stages | str | Path
)


def diff(a: Comparable, b: Comparable, *, example_inputs: ExampleInputs | None = None) -> GraphDiff:
    """Return the changes that turn ``a`` into ``b``; none if both are the same graph.

    >>> print(sp_compiler.diff(model, other_model, example_inputs=((ids,), {})))
    >>> sp_compiler.diff(module.stages["capture"], module).to_html("diff.html")
    >>> print(sp_compiler.diff(module.code, Path("edited.py")))  # what an edit of the code changes

    A compiled module is compared by the graphs that it runs; an uncompiled module is captured,
    normalized and cut into its distinct layers. Regions are matched by name. If forward and
    backward are partitioned on one side only, ``"Block"`` matches ``"Block.forward"``, and
    ``"Block.backward"`` is an added graph. A single graph is compared with the forward of a stage
    of one region.

    Names of nodes and different forms of the same call are not differences. Neither side is
    changed; 10,000 nodes take a few seconds.

    Args:
        a: the first side: a module, a stage of a compilation, a ``Program``, an FX graph or graph
            module, an exported program, or generated code: its text, or the path of a file.
        b: the second side, like ``a``.
        example_inputs: (args, kwargs) of a call, for uncompiled modules.

    Raises:
        ArgumentError: an argument of another type, text that is not generated code, an uncompiled
            module without ``example_inputs``, or a single graph compared with a stage of several
            regions.
        CaptureError: an uncompiled module cannot be captured.
    """
    # By ``type()``, because ``__class__`` of a compiled module is the model's class.
    first, second = (snapshot_of.dispatch(type(each))(each, example_inputs) for each in (a, b))
    # Only by name: matching by position would compare regions of two models that have nothing in
    # common but their order.
    first, second = _named_like(first, second), _named_like(second, first)
    sections = []
    for title, name, old, new in _pairs(first, second):
        paths = set(first.paths(name)), set(second.paths(name))
        # A name may mean different layers on each side: count only the common ones.
        count = len(paths[0] & paths[1]) or max(1, *map(len, paths))
        section = _section(title, count, old, new)
        if section is not None:
            sections.append(section)
    return GraphDiff(
        tuple(sections), tuple(_call_changes(first, second)), totals(first), totals(second)
    )


def _named_like(stage: Snapshot, other: Snapshot) -> Snapshot:
    """Return ``stage``; a single graph gets the name and the calls of the other's only region."""
    if list(stage.graphs) != [FLAT] or list(other.graphs) == [FLAT]:
        return stage
    # Forward and backward of one region count as one.
    regions = list(dict.fromkeys(map(region_of, other.graphs)))
    if len(regions) != 1:
        raise ArgumentError(
            f"cannot compare a single graph with {len(regions)} regions ({', '.join(regions)}); "
            "compare it with one of their graphs, or give the full stage or program"
        )
    return Snapshot(stage.name, {regions[0]: stage.graphs[FLAT]}, other.calls)


def _pairs(
    first: Snapshot, second: Snapshot
) -> Iterator[tuple[str, str, Graph | None, Graph | None]]:
    """Yield title, name and both graphs of each region, None if a side has none."""
    # Matched graphs are removed from it; graphs that remain at the end were added.
    rest = dict(second.graphs)
    unmatched: dict[str, Graph] = {}
    # Before the split into forward and backward a region has one graph, which became the forward.
    for name, graph in first.graphs.items():
        candidates = (name, f"{name}{FORWARD}", name.removesuffix(FORWARD))
        match = next((candidate for candidate in candidates if candidate in rest), None)
        # Kinds of layers are numbered in order: a new kind renames all kinds after it.
        if match is None or _is_elsewhere(name, match, first, second):
            unmatched[name] = graph
        else:
            yield match, match, graph, rest.pop(match)
    # A layer that now differs from the others is a new region: its path tells which one it was.
    for name, graph in unmatched.items():
        now = _in_same_layer(name, first, second)
        counterpart = second.graphs.get(now)
        rest.pop(now, None)
        yield f"{now} (was {name})" if counterpart else name, name, graph, counterpart
    for name, graph in rest.items():
        was = _in_same_layer(name, second, first)
        counterpart = first.graphs.get(was)
        yield f"{name} (was {was})" if counterpart else name, name, counterpart, graph


def _is_elsewhere(name: str, match: str, first: Snapshot, second: Snapshot) -> bool:
    """Whether ``match`` runs in none of the layers that ran ``name``, if these are still there."""
    old, new = first.paths(name), second.paths(match)
    if not all(old) or not all(new) or set(old) & set(new):
        return False
    return any(path in dict(second.calls) for path in old)


def _in_same_layer(name: str, stage: Snapshot, other: Snapshot) -> str:
    """Name of the graph of ``other`` in the first layer that uses the graph ``name``, or ""."""
    region, there = region_of(name), other.region_by_place()
    # Calls outside of layers have no path that would identify them.
    places = [place for place in _places(stage, region, name) if place[0] and place in there]
    return f"{there[places[0]]}{name.removeprefix(region)}" if places else ""


def _places(stage: Snapshot, *regions: str) -> list[tuple[str, int]]:
    return [place for place, region in stage.region_by_place().items() if region in regions]


def _section(name: str, count: int, old: Graph | None, new: Graph | None) -> Section | None:
    if old is None or new is None:
        return _one_sided(name, count, old, new)
    nodes = tuple(_entries(Alignment(old, new)))
    differs = any(entry.kind != "unchanged" for entry in nodes)
    return Section(name, "changed", count, nodes) if differs else None


def _one_sided(name: str, count: int, old: Graph | None, new: Graph | None) -> Section:
    graph = new or old
    assert graph is not None
    infos = [node_info(node) for node in graph.nodes]
    if new is None:
        nodes = tuple(Entry("removed", info, None) for info in infos)
        return Section(name, "removed", count, nodes, _summary(graph))
    nodes = tuple(Entry("inserted", None, info) for info in infos)
    return Section(name, "inserted", count, nodes, _summary(graph))


def _summary(graph: Graph) -> Summary:
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    # A list of its operators is more useful than hundreds of lines that begin with "+".
    ops = Counter(render_target(node) for node in calls)
    collectives = Counter(kind for node in calls if (kind := collective_text(node)))
    return Summary(len(calls), tuple(ops.most_common()), tuple(collectives.most_common()))


def _call_changes(first: Snapshot, second: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Return (path, before, after) of calls that only one side has, or whose arguments changed."""
    first = _numbered_like(first, second)
    if first.calls == second.calls:
        wirings = zip(first.calls, first.wiring, second.wiring, strict=False)
        # Same calls: the difference is in the values that they pass to each other.
        yield from ((path, old, new) for (path, _), old, new in wirings if old != new)
        return
    # Without ``autojunk``, which ignores frequent items such as calls of a repeated layer.
    matcher = SequenceMatcher(None, first.calls, second.calls, autojunk=False)
    for tag, start, stop, other, end in matcher.get_opcodes():
        old, new = first.calls[start:stop], second.calls[other:end]
        # The same layers, which now call another region.
        if tag == "replace" and [path for path, _ in old] == [path for path, _ in new]:
            yield from ((path, x, y) for (path, x), (_, y) in zip(old, new, strict=True))
        elif tag != "equal":
            yield from ((path, region, "") for path, region in old)
            yield from ((path, "", region) for path, region in new)


def _numbered_like(stage: Snapshot, other: Snapshot) -> Snapshot:
    """Return ``stage`` with the numbers of ``other`` for kinds of layers in the same places."""
    there = other.region_by_place()

    @functools.cache
    def name_in_other(name: str) -> str:
        # A new kind of layer renames all kinds after it, which is not a difference.
        places = _places(stage, name)
        now = there.get(places[0], name)
        in_layers = all(path for path, _ in places)
        same = places == _places(other, now) and _unnumbered(now) == _unnumbered(name)
        return now if in_layers and same else name

    return stage.renamed([name_in_other(name) for _, name in stage.calls])


def _unnumbered(region: str) -> str:
    return region.rstrip("0123456789")


def _entries(alignment: Alignment) -> Iterator[Entry]:
    """Return entries in the order of the second graph; a removed node comes before its former
    successor."""
    moves = _moves(alignment)
    # A part of an expansion is neither inserted nor matched: the entry of its value covers it.
    inserted = set(alignment.inserted)
    removed = _removed_before(alignment)
    for node in (*alignment.after, None):  # None: removed from the end
        for gone in removed.get(node, ()):
            yield Entry("removed", node_info(gone), None)
        if node in inserted:
            yield Entry("inserted", None, node_info(node))
        elif node in alignment.back:
            old = alignment.back[node]
            changes = (*_changes(alignment, old, node), *moves.get(node, ()))
            kind: Fate = "changed" if changes else "unchanged"
            yield Entry(kind, node_info(old), node_info(node), changes)


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
    """Return matched nodes outside the longest sequence that both graphs have in the same order."""
    position = {node: index for index, node in enumerate(alignment.after)}
    matched = [node for node in alignment.before if node in alignment.forth]
    # Fewest nodes count as moved if the longest sequence in the same order counts as unmoved.
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
    became = alignment.expansions.get(old, [new])
    targets = render_target(old), " + ".join(dict.fromkeys(map(render_target, became)))
    # A placeholder's target is its name, and names are not differences.
    if targets[0] != targets[1] and old.op != "placeholder":
        yield Change("target", *targets)
    if not alignment.same_arguments(old, new):
        yield Change("args", _arguments_text(old), _arguments_text(new))
    yield from _value_changes(old, new)
    placements = meta_text(old, "placement"), meta_text(new, "placement")
    # A value without a placement is full, which on several ranks is the placement I.
    if placements[0] != placements[1] and not {"", str(I)}.issuperset(placements):
        yield Change("placement", *placements)
    # Each operator of an expansion has its own tag: if one is saved, others may not be.
    new_tags = dict.fromkeys(tag for node in became if (tag := meta_text(node, "recompute")))
    tags = meta_text(old, "recompute"), " + ".join(new_tags)
    if tags[0] != tags[1]:
        yield Change("recompute", *tags)


def _arguments_text(node: Node) -> str:
    return f"({render_arguments(node, lambda value: f'%{value.name}')})"


def _value_changes(old: Node, new: Node) -> Iterator[Change]:
    before, after = old.meta.get("val"), new.meta.get("val")
    # Separately, so that filters find every change of a dtype or a shape.
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
