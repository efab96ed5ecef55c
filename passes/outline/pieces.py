"""Split a flat graph into pieces: runs of nodes of one layer, and glue between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from sp_compiler.base.provenance import OUTSIDE, ModuleCall, layer_of
from sp_compiler.base.python_text import identifier
from sp_compiler.ir.fx import ancestors, is_getitem

TABLES = "Tables"
"""Name of the piece with the values that depend only on inputs."""


@dataclass
class Piece:
    """Consecutive nodes that become one call."""

    layer: ModuleCall
    nodes: list[Node] = field(default_factory=list)
    name: str = ""


def pieces_of(graph: Graph, fixed: Collection[Node] | None) -> list[Piece]:
    """Return consecutive runs of one layer.

    Glue that does not depend on layers goes to the front, or, if only one later piece of glue uses
    it, into that piece.

    Args:
        graph: flat.
        fixed: placeholders; values of the first piece that depend only on these and that layers
            read become a separate piece at the front.
    """
    nodes = [node for unit in _units(graph.nodes) for node in unit]
    # The parts of a split belong where the split does, whatever module unpacked them.
    layers: dict[Node, ModuleCall] = {}
    for node in nodes:
        layers[node] = layers[node.args[0]] if is_getitem(node) else layer_of(node)
    after_layer: set[Node] = set()
    early, rest = [], []
    for node in nodes:
        if layers[node] is not OUTSIDE or not after_layer.isdisjoint(node.all_input_nodes):
            after_layer.add(node)
            rest.append(node)
        else:
            early.append(node)
    # Masks and rotary tables, wherever they were traced: at the front, made once, for every layer.
    pieces = [Piece(OUTSIDE, early)]
    for node, layer in zip(rest, _with_enclosed_glue([layers[node] for node in rest]), strict=True):
        if pieces[-1].layer != layer:
            pieces.append(Piece(layer))
        pieces[-1].nodes.append(node)
    # Values that only the loss needs, such as shifted labels, would otherwise live through all
    # layers.
    for piece in pieces[1:]:
        if piece.layer is OUTSIDE:
            _sink(pieces[0], piece)
    tables = Piece(OUTSIDE)
    if fixed is not None:
        _move_tables(pieces[0], tables, fixed)
    pieces = [piece for piece in pieces if piece.nodes]
    _name_pieces(pieces)
    if tables.nodes:
        tables.name = TABLES
        pieces.insert(0, tables)
    return pieces


def _units(nodes: Iterable[Node]) -> list[list[Node]]:
    """Group each operator with its results, because a list of tensors cannot be an output of a
    region."""
    units: dict[Node, list[Node]] = {}
    for node in nodes:
        if is_getitem(node):
            units[node.args[0]].append(node)
        elif node.op == "call_function":
            units[node] = [node]
    return list(units.values())


def _with_enclosed_glue(layers: list[ModuleCall]) -> list[ModuleCall]:
    """Assign glue between two pieces of the same layer to that layer."""
    # For each node the nearest layers on both sides, in one sweep each.
    following = OUTSIDE
    next_layer = []
    for layer in reversed(layers):
        following = following if layer is OUTSIDE else layer
        next_layer.append(following)
    previous, joined = OUTSIDE, []
    for layer, after in zip(layers, reversed(next_layer), strict=True):
        previous = previous if layer is OUTSIDE else layer
        joined.append(previous if layer is OUTSIDE and previous == after else layer)
    return joined


def _sink(first: Piece, last: Piece) -> None:
    """Move nodes of ``first`` that only ``last`` uses to the front of ``last``."""
    targets = set(last.nodes)
    kept: list[list[Node]] = []
    sunk: list[list[Node]] = []
    # Backwards, so that the users of a node have moved before the node is examined.
    for unit in reversed(_units(first.nodes)):
        users = {user for node in unit for user in node.users}.difference(unit)
        if users and targets.issuperset(users):
            targets.update(unit)
            sunk.append(unit)
        else:
            kept.append(unit)
    first.nodes = [node for unit in reversed(kept) for node in unit]
    last.nodes = [*(node for unit in reversed(sunk) for node in unit), *last.nodes]


def _move_tables(first: Piece, tables: Piece, fixed: Collection[Node]) -> None:
    """Move nodes of ``first`` that depend only on ``fixed`` and that later pieces read to
    ``tables``."""
    inside, determined = set(first.nodes), set(fixed)
    for unit in _units(first.nodes):
        if all(operand in determined for node in unit[:1] for operand in node.all_input_nodes):
            determined.update(unit)
    read = [n for n in first.nodes if n in determined and any(u not in inside for u in n.users)]
    moved = {node for unit in _units(first.nodes) for node in unit} & ancestors(read)
    # An operator with several results moves as one.
    moved |= {user for node in moved for user in node.users if is_getitem(user)}
    tables.nodes = [node for node in first.nodes if node in moved]
    first.nodes = [node for node in first.nodes if node not in moved]


def _name_pieces(pieces: list[Piece]) -> None:
    last = len(pieces) - 1
    # Names of classes in the generated code; equal ones are numbered once regions are known.
    for index, piece in enumerate(pieces):
        if piece.layer is not OUTSIDE:
            piece.name = identifier(piece.layer.class_name)  # a class's name may be any text
        elif last == 0:
            piece.name = "Model"
        else:
            piece.name = {0: "Prologue", last: "Epilogue"}.get(index, "Glue")
