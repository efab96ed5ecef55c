"""Cut a flat graph into the program's regions: one distinct region for all layers that are alike.

What is outside layers (:mod:`sp_compiler.base.provenance`) is glue. Layers whose graphs are equal,
down to shapes, types and what requires a gradient, share one region.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

import sp_compiler.ops.operators  # noqa: F401 - registers the operators
from sp_compiler.base.provenance import OUTSIDE, Layer, layer_of, module_path
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import is_call, is_getitem
from sp_compiler.ir.hints import Wish
from sp_compiler.ir.program import Call, Program, Ref, RefKind, Region
from sp_compiler.ir.rewriting import copy_call
from sp_compiler.ir.symbolic import same_shape, symbol_of, symbols_in

_sp = torch.ops.sp_compiler
_DROPOUTS = (_sp.dropout.default, _sp.dropout_mask.default)
_WITH_WEIGHT = (
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.layer_norm.default,
    torch.ops.aten.embedding.default,
)
# Order of a region's placeholders.
_KIND_ORDER: tuple[RefKind, ...] = ("param", "buffer", "constant", "input", "call", "seed", "size")
_KEPT_META = ("val", "requires_grad", "nn_module_stack", "stack_trace", "origin")


@dataclass
class _Piece:
    """Consecutive nodes that become one call."""

    layer: Layer
    nodes: list[Node] = field(default_factory=list)
    name: str = ""


def outline(captured: Captured, wishes: Mapping[str, Wish] | None = None) -> Program:
    """The program of a normalised capture; ``captured`` itself stays as it is.

    Every call's arguments come from parameters, buffers, constants, user inputs, the seed and
    earlier calls. A value that a piece only passes on is not an output of it.

    Args:
        captured: normalised.
        wishes: by parameter; layers whose parameters must be placed differently are kept apart.
    """
    wishes = dict(wishes or {})
    graph = captured.module.graph
    pieces = _pieces(graph)
    _name_pieces(pieces)
    refs = dict(zip(captured.placeholders, captured.refs, strict=True))
    last_uses = _outputs_of_pieces(pieces, graph)
    distinct: dict[str, Region] = {}
    program_calls = []
    for index, piece in enumerate(pieces):
        draft, inputs = _draft_region(piece, refs, last_uses[index])
        text = f"{_canonical_text(draft)}\n{_asked(inputs, refs, wishes)}"
        if text not in distinct:
            distinct[text] = draft.finish()
        region = distinct[text]
        program_calls.append(Call(region, piece.layer.path, tuple(refs[node] for node in inputs)))
        for position, node in enumerate(last_uses[index]):
            refs[node] = Ref("call", index=index, output=position)
    _make_names_unique(distinct.values())
    outputs = [refs[leaf] if isinstance(leaf, Node) else leaf for leaf in captured.outputs]
    mutated = {name: refs[node] for name, node in captured.mutated_buffers.items()}
    return Program(
        program_calls,
        outputs,
        captured.out_spec,
        mutated,
        dict(captured.aliases),
        dict(captured.constants),
        list(captured.notes),
        captured.parameters,
        wishes,
        captured.sizes,
    )


def _pieces(graph: Graph) -> list[_Piece]:
    """Consecutive runs of one layer.

    Glue that needs no layer's result goes to the front, or, where only one later piece of glue uses
    it, there.
    """
    nodes = [node for unit in _units(graph.nodes) for node in unit]
    layers = _layers(nodes)
    after_layer: set[Node] = set()
    early, rest = [], []
    for node in nodes:
        if layers[node] is not OUTSIDE or not after_layer.isdisjoint(node.all_input_nodes):
            after_layer.add(node)
            rest.append(node)
        else:
            early.append(node)
    pieces = [_Piece(OUTSIDE, early)]
    for node, layer in zip(rest, _with_enclosed_glue([layers[node] for node in rest]), strict=True):
        if pieces[-1].layer != layer:
            pieces.append(_Piece(layer))
        pieces[-1].nodes.append(node)
    for piece in pieces[1:]:
        if piece.layer is OUTSIDE:
            _sink(pieces[0], piece)
    return [piece for piece in pieces if piece.nodes]


def _units(nodes: Iterable[Node]) -> list[list[Node]]:
    """Each operator with the parts of its results: a list of tensors cannot leave a region."""
    units: dict[Node, list[Node]] = {}
    for node in nodes:
        if is_getitem(node):
            units[node.args[0]].append(node)
        elif node.op == "call_function":
            units[node] = [node]
    return list(units.values())


def _layers(nodes: list[Node]) -> dict[Node, Layer]:
    """Layer of each node; the parts of a split belong where the split does."""
    layers: dict[Node, Layer] = {}
    for node in nodes:
        layers[node] = layers[node.args[0]] if is_getitem(node) else layer_of(node)
    return layers


def _with_enclosed_glue(layers: list[Layer]) -> list[Layer]:
    """Glue between two pieces of the same layer joins that layer."""
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


def _sink(first: _Piece, last: _Piece) -> None:
    """Move nodes of ``first`` that only ``last`` uses to the front of ``last``."""
    targets = set(last.nodes)
    kept: list[list[Node]] = []
    sunk: list[list[Node]] = []
    for unit in reversed(_units(first.nodes)):
        users = {user for node in unit for user in node.users}.difference(unit)
        if users and targets.issuperset(users):
            targets.update(unit)
            sunk.append(unit)
        else:
            kept.append(unit)
    first.nodes = [node for unit in reversed(kept) for node in unit]
    last.nodes = [*(node for unit in reversed(sunk) for node in unit), *last.nodes]


def _name_pieces(pieces: list[_Piece]) -> None:
    last = len(pieces) - 1
    for index, piece in enumerate(pieces):
        if piece.layer is not OUTSIDE:
            piece.name = piece.layer.class_name
        elif last == 0:
            piece.name = "Model"
        else:
            piece.name = {0: "Prologue", last: "Epilogue"}.get(index, "Glue")


def _outputs_of_pieces(pieces: list[_Piece], graph: Graph) -> list[list[Node]]:
    """For each piece the nodes that later pieces or the model's outputs use, in order."""
    outputs = []
    for piece in pieces:
        inside = set(piece.nodes)
        outputs.append([n for n in piece.nodes if any(user not in inside for user in n.users)])
    return outputs


@dataclass
class _Draft:
    """A region whose graph is not a module yet, which most repeated layers never need."""

    name: str
    graph: Graph
    input_kinds: tuple[RefKind, ...]
    input_names: tuple[str, ...]

    def finish(self) -> Region:
        self.graph.lint()
        module = GraphModule(torch.nn.Module(), self.graph)
        return Region(self.name, module, self.input_kinds, self.input_names)


def _draft_region(
    piece: _Piece, refs: dict[Node, Ref], outputs: list[Node]
) -> tuple[_Draft, list[Node]]:
    """The region of one piece and the nodes of the flat graph that are its inputs, in order."""
    inputs = _inputs_of(piece, refs)
    graph = Graph()
    copies: dict[Node, Node] = {}
    names = []
    for node in inputs:
        name = _input_name(refs[node], piece.layer.path)
        copies[node] = graph.placeholder(_identifier(name) or _carried_name(node, outputs))
        copies[node].target = copies[node].name
        copies[node].meta = _meta(node, keys=("val", "requires_grad"))
        names.append(name or copies[node].name)
    site = 0
    for node in piece.nodes:
        args = map_arg(node.args, copies.__getitem__)
        if is_call(node, *_DROPOUTS):
            args = (*args[:3], site, *args[4:])
            site += 1
        kwargs = map_arg(node.kwargs, copies.__getitem__)
        copies[node] = copy_call(graph, node, args, kwargs, _value_name(node))
        copies[node].meta = _meta(node)
    graph.output(tuple(copies[node] for node in outputs))
    kinds = tuple(refs[node].kind for node in inputs)
    return _Draft(piece.name, graph, kinds, tuple(names)), inputs


def _inputs_of(piece: _Piece, refs: dict[Node, Ref]) -> list[Node]:
    """Values from outside, ordered by kind and then by first use."""
    inside = set(piece.nodes)
    used = dict.fromkeys(n for node in piece.nodes for n in node.all_input_nodes if n not in inside)
    sizes = [node for node, ref in refs.items() if ref.kind == "size"]
    symbols = symbols_in([*used, *piece.nodes]) if sizes else set()
    used |= {node: None for node in sizes if symbol_of(node) in symbols}
    return sorted(used, key=lambda node: _KIND_ORDER.index(refs[node].kind))


def _input_name(ref: Ref, path: str) -> str:
    """Name inside the layer of a parameter or buffer; "" for values, which have none."""
    if ref.kind in ("param", "buffer"):
        return ref.name.removeprefix(f"{path}.")
    return ref.name


def _carried_name(node: Node, outputs: list[Node]) -> str:
    """A value from elsewhere: ``hidden`` where the region returns one like it."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return node.name
    alike = any(
        same_shape(value.shape, out.meta["val"].shape) and value.dtype is out.meta["val"].dtype
        for out in outputs
    )
    return "hidden" if alike and node.op == "call_function" else _value_name(node)


def _meta(node: Node, keys: tuple[str, ...] = _KEPT_META) -> dict[str, Any]:
    return {key: node.meta[key] for key in keys if key in node.meta}


def _value_name(node: Node) -> str:
    """What the value is called in its region; numbered afresh where several have one name.

    Results of a module's own weight are named after the module (``c_attn``), others after the
    operator.
    """
    module = module_path(node).rsplit(".", 1)[-1]
    if module.isidentifier() and _applies_weight(node):
        return module
    if is_call(node, torch.ops.aten.reshape.default):
        return "reshape"
    return re.sub(r"(_\d+)+$", "", node.name).lstrip("_") or "value"


def _applies_weight(node: Node) -> bool:
    """True for products with, norms by and lookups in a parameter, and for adding a bias to one."""
    weights = [arg for arg in node.all_input_nodes if arg.op == "placeholder"]
    if is_call(node, torch.ops.aten.add.Tensor):
        source = node.args[0]
        return bool(weights) and isinstance(source, Node) and is_call(source, *_WITH_WEIGHT)
    return bool(weights) and is_call(node, *_WITH_WEIGHT)


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _canonical_text(draft: _Draft) -> str:
    """Everything that must agree for two pieces to be one region, as text."""
    number = {node: index for index, node in enumerate(draft.graph.nodes)}
    lines = [" ".join(draft.input_kinds)]
    for node in draft.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Numbered(number[n]))
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {target} {args} {dict(sorted(kwargs.items()))} {_type_text(node)}")
    return "\n".join(lines)


def _asked(
    inputs: list[Node], refs: dict[Node, Ref], wishes: Mapping[str, Wish]
) -> list[tuple[int, tuple[bool, ...]]]:
    names = [refs[node].name if refs[node].kind == "param" else "" for node in inputs]
    return [(i, wishes[name].allowed) for i, name in enumerate(names) if name in wishes]


@dataclass(frozen=True)
class _Numbered:
    """Stands for a node in the canonical text."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


def _type_text(node: Node) -> str:
    if node.op == "output":
        return ""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    types = [
        f"{v.dtype}{list(v.shape)}@{v.device}" if isinstance(v, Tensor) else str(v) for v in values
    ]
    return f"{types} grad={node.meta['requires_grad']}"


def _make_names_unique(regions: Iterable[Region]) -> None:
    """Number the second and later regions of the same name: ``Block``, ``Block2``."""
    taken: set[str] = set()
    for region in regions:
        name, count = region.name, 1
        while name in taken:
            count += 1
            name = f"{region.name}{count}"
        taken.add(name)
        region.name = name
