"""The result of a graph comparison as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sp_compiler.base.units import bytes_text
from sp_compiler.ops.registry import Collective

Fate = Literal["unchanged", "changed", "inserted", "removed"]
"""What happened to a node between the first graph and the second."""
Kind = Literal[
    "unchanged",
    "replaced",
    "shape",
    "placement",
    "tagged",
    "moved",
    "inserted",
    "collective",
    "removed",
]
"""Kinds for filters: a changed node has one for each property that changed; inserted collectives
are separate from other inserted nodes."""
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]
Field = Literal["target", "args", "value", "dtype", "shape", "placement", "recompute", "order"]

_KIND_OF: dict[Field, Kind] = {
    "target": "replaced",
    "args": "replaced",
    "value": "shape",
    "dtype": "shape",
    "shape": "shape",
    "placement": "placement",
    "recompute": "tagged",
    "order": "moved",
}


@dataclass(frozen=True)
class Change:
    """Change of one property of a node; "" means that it has none."""

    field: Field
    before: str
    after: str


@dataclass(frozen=True)
class NodeInfo:
    """One node in one of the graphs; "" means that a property does not exist.

    Attributes:
        name: its name in the graph.
        op: its operator, such as "aten.linear".
        text: the node as one line.
        users: names of the nodes that use it.
        collective: the kind of communication ("all_gather", ...).
        value: dtype and shape, such as "f32[2, 4]".
        num_bytes: bytes of the value, on one rank in a sharded graph; ``None`` if a size is open.
        placement: such as "S(0)".
        tag: "save" or "recompute".
        module: path of the module in the user's model.
        line: of the user's model, as "file.py:12 code".
    """

    name: str
    op: str
    text: str
    users: tuple[str, ...] = ()
    collective: str = ""
    value: str = ""
    num_bytes: int | None = None
    placement: str = ""
    tag: str = ""
    module: str = ""
    line: str = ""


@dataclass(frozen=True)
class Entry:
    """One node of either graph, or of both.

    Attributes:
        kind: how it changed from the first graph to the second.
        before: the node in the first graph, ``None`` if it was inserted.
        after: the node in the second graph, ``None`` if it was removed.
        changes: its changed properties; empty unless ``kind`` is "changed".
    """

    kind: Fate
    before: NodeInfo | None
    after: NodeInfo | None
    changes: tuple[Change, ...] = ()

    @property
    def shown(self) -> NodeInfo:
        """The node in the second graph, in the first one if it was removed."""
        shown = self.after or self.before
        assert shown is not None
        return shown

    @property
    def node(self) -> str:
        return self.shown.name

    @property
    def op(self) -> str:
        return self.shown.op

    @property
    def text(self) -> str:
        return self.shown.text

    @property
    def users(self) -> tuple[str, ...]:
        return self.shown.users

    @property
    def collective(self) -> str:
        return self.shown.collective

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All its kinds, in the order of :data:`KINDS`."""
        if self.kind == "changed":
            changed = {_KIND_OF[change.field] for change in self.changes}
            return tuple(kind for kind in KINDS if kind in changed)
        if self.kind == "inserted" and self.collective:
            return ("collective",)
        return (self.kind,)


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
        name: name of the graph, "" if it has none.
        kind: "changed" for a graph that is on both sides.
        count: number of layers that use it.
        nodes: all nodes of both graphs, in graph order, including unchanged ones.
        summary: summary of a graph that exists on one side only.
    """

    name: str
    kind: Fate
    count: int
    nodes: tuple[Entry, ...] = ()
    summary: Summary | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Nodes that differ from a counterpart; a graph without one has its ``summary``."""
        if self.summary is not None:
            return ()
        return tuple(entry for entry in self.nodes if entry.kind != "unchanged")


@dataclass(frozen=True)
class Totals:
    """Totals of one side of a comparison; each graph counts once per layer that uses it.

    Attributes:
        name: name of the side: a stage, or the type of the argument.
        num_nodes: number of nodes, without inputs, parameters and outputs.
        collectives: one entry per kind.
        flops: FLOPs of matrix products (2 per multiply-add), on one rank in sharded graphs;
            ``None`` if the shape of a node is unknown.
        kept_bytes: bytes saved between forward and backward, ``None`` before the partition. A value
            that several layers save counts in each; :attr:`sp_compiler.Plan.activation_bytes`
            counts it once.
    """

    name: str = ""
    num_nodes: int = 0
    collectives: tuple[Collective, ...] = ()
    flops: int | None = None
    kept_bytes: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.num_nodes} nodes"]
        parts += [f"{c.count} {c.kind} of {bytes_text(c.num_bytes)}" for c in self.collectives]
        if self.flops is not None:
            parts.append(f"{self.flops:.4g} matrix FLOPs")
        if self.kept_bytes is not None:
            parts.append(f"keeps {bytes_text(self.kept_bytes)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Equal:
    """A run of unchanged nodes that is folded."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Repeat:
    """Entries that repeat with different names, as in equal layers of a flat graph.

    Attributes:
        first: the entries to show.
        others: the folded repetitions.
    """

    first: tuple[Entry | Equal, ...]
    others: tuple[tuple[Entry | Equal, ...], ...]


Item: TypeAlias = Entry | Equal | Repeat
