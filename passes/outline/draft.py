"""Draft of a region from a piece, with values named as in the user's model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.provenance import module_path
from sp_compiler.codegen.user_source import frames
from sp_compiler.ir.fx import is_call, module_of
from sp_compiler.ir.op_traits import DRAWS, is_cast
from sp_compiler.ir.program import Ref, RefKind, Region
from sp_compiler.ir.rewriting import copy_call
from sp_compiler.ir.symbolic import same_shape, symbol_of, symbols_in
from sp_compiler.passes.outline.pieces import TABLES, Piece

_WITH_WEIGHT = (
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.layer_norm.default,
    torch.ops.aten.embedding.default,
)
# Order of a region's placeholders.
_KIND_ORDER: tuple[RefKind, ...] = ("param", "buffer", "constant", "input", "call", "seed", "size")
# Without "source", which names nodes of the flat graph: from here on it names the region's nodes.
_KEPT_META = ("val", "requires_grad", "nn_module_stack", "stack_trace", "origin")


@dataclass
class Draft:
    """A region whose graph is not a module yet: creating modules takes time, and repeated layers
    need none."""

    name: str
    graph: Graph
    input_kinds: tuple[RefKind, ...]
    input_names: tuple[str, ...]

    def finish(self) -> Region:
        self.graph.lint()
        module = module_of(self.graph)
        return Region(self.name, module, self.input_kinds, self.input_names)

    @property
    def inputs(self) -> list[Node]:
        return self.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> list[Node]:
        return list(self.graph.output_node().args[0])


def draft_region(
    piece: Piece, refs: dict[Node, Ref], outputs: list[Node], *, is_trained: bool
) -> tuple[Draft, list[Node]]:
    """Return the region of one piece and its inputs, nodes of the flat graph, in order.

    If it is not ``is_trained``, none of its values requires a gradient.
    """
    inputs = _inputs_of(piece, refs)
    graph = Graph()
    copies: dict[Node, Node] = {}
    names = []
    for node in inputs:
        # Parameters and buffers as the layer calls them, so that equal layers have equal names;
        # constants by their own name; values have none.
        name = refs[node].name
        if refs[node].kind in ("param", "buffer"):
            name = name.removeprefix(f"{piece.layer.path}.")
        copies[node] = graph.placeholder(re.sub(r"\W", "_", name) or _carried_name(node, outputs))
        copies[node].target = copies[node].name
        # Without module and source line: those belong to another layer, and differ between calls.
        copies[node].meta = _meta(node, keys=("val", "requires_grad"))
        names.append(name or copies[node].name)
    # Numbered within the region, so that all layers have the same numbers; two parts of one draw
    # share a number.
    sites: dict[int, int] = {}
    for node in piece.nodes:
        args = map_arg(node.args, copies.__getitem__)
        if is_call(node, *DRAWS):
            args = (*args[:3], sites.setdefault(args[3], len(sites)), *args[4:])
        kwargs = map_arg(node.kwargs, copies.__getitem__)
        copies[node] = copy_call(graph, node, args, kwargs, _value_name(node))
        copies[node].meta = _meta(node)
    if not is_trained:
        for copy in graph.nodes:
            copy.meta["requires_grad"] = False
    graph.output(tuple(copies[node] for node in outputs))
    kinds = tuple(refs[node].kind for node in inputs)
    return Draft(piece.name, graph, kinds, tuple(names)), inputs


def _inputs_of(piece: Piece, refs: dict[Node, Ref]) -> list[Node]:
    """Return values from outside, ordered by kind and then by first use."""
    inside = set(piece.nodes)
    used = dict.fromkeys(n for node in piece.nodes for n in node.all_input_nodes if n not in inside)
    # Open sizes are not operands: they occur in the shapes and arguments of the nodes.
    sizes = [node for node, ref in refs.items() if ref.kind == "size"]
    symbols = symbols_in([*used, *piece.nodes]) if sizes else set()
    used |= {node: None for node in sizes if symbol_of(node) in symbols}
    if piece.name == TABLES and not any(isinstance(n.meta["val"], Tensor) for n in used):
        # A mask made of ones and zeros reads nothing, but is made on the device of an input.
        used |= {node: None for node, ref in refs.items() if ref.kind == "input"}
    return sorted(used, key=lambda node: _KIND_ORDER.index(refs[node].kind))


def _carried_name(node: Node, outputs: list[Node]) -> str:
    """Name a value from outside: ``hidden`` if the region returns one like it."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):  # an open size
        return node.name
    alike = any(
        same_shape(value.shape, out.meta["val"].shape) and value.dtype is out.meta["val"].dtype
        for out in outputs
    )
    if alike and node.op == "call_function":
        return "hidden"
    return _assigned_name(node) or _value_name(node)


def _assigned_name(node: Node) -> str:
    """Return the name that the user's statement gives to a value; "" if uncertain."""
    while is_cast(node):  # ``return cos.to(x.dtype)``: the value has its name from before
        node = node.args[0]
    trace = frames(node.meta.get("stack_trace") or "")
    statement = trace[-1].statement if trace else None
    # A line has several values: it assigns the last one, which no other value of the line uses.
    used_by = [frames(user.meta.get("stack_trace") or "")[-1:] for user in node.users]
    if statement is None or statement.unpacks or trace[-1:] in used_by:
        return ""
    return statement.targets[0]


def _meta(node: Node, keys: tuple[str, ...] = _KEPT_META) -> dict[str, Any]:
    return {key: node.meta[key] for key in keys if key in node.meta}


def _value_name(node: Node) -> str:
    """Name a value in its region; FX numbers equal names.

    Results that involve a module's weight are named after the module (``c_attn``), others after the
    operator.
    """
    module = module_path(node).rsplit(".", 1)[-1]
    if module.isidentifier() and _applies_weight(node):
        return module
    if is_call(node, torch.ops.aten.reshape.default):
        return "reshape"
    return re.sub(r"(_\d+)+$", "", node.name).lstrip("_") or "value"


def _applies_weight(node: Node) -> bool:
    """Return whether the node is a matmul, norm or lookup with a parameter, or the sum of one and a
    bias."""
    weights = [arg for arg in node.all_input_nodes if arg.op == "placeholder"]
    if is_call(node, torch.ops.aten.add.Tensor):
        source = node.args[0]
        return bool(weights) and isinstance(source, Node) and is_call(source, *_WITH_WEIGHT)
    return bool(weights) and is_call(node, *_WITH_WEIGHT)
