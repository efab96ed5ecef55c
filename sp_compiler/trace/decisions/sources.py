"""Computations of numbers during a capture, and whether they need only inputs and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from sp_compiler.base.decisions import NumberRead
from sp_compiler.base.warn import user_line
from sp_compiler.ir.fx import mutates, written_operands
from sp_compiler.ir.program import Ref

# Modules with the functions that compute with sizes.
_PURE = ("_operator", "math", "torch", "builtins")


def node_of(tensor: Tensor) -> Node | None:
    """Return the node that stands for ``tensor`` in the graph that is being traced."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


@dataclass(frozen=True)
class Sources:
    """Sources of the values of traced tensors.

    Attributes:
        refs: references of the placeholders that are inputs, buffers and parameters.
        constants: constant tensors in the trace, each with the real tensor.
        leaves, buffers: the real inputs and buffers.
    """

    refs: Mapping[Node, Ref]
    constants: Sequence[tuple[Tensor, Tensor]]
    leaves: Sequence[Any]
    buffers: Mapping[str, Tensor]

    def refusal(self, node: Node) -> str:
        """Return why ``node`` cannot be computed before a call; "" if it can."""
        if node.op == "placeholder":
            return self._refusal_of_source(self.refs.get(node))
        if node.op == "get_attr":
            return "" if self.constant(node) is not None else "a tensor that the model made"
        if not isinstance(node.target, OpOverload):
            # Arithmetic on sizes, which only reads; grad-mode nodes and such are not operands.
            return "" if getattr(node.target, "__module__", "") in _PURE else str(node.target)
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return f"random numbers ({node.target})"
        if node.target.namespace not in ("aten", "prims"):
            return f"an operator of the model's own ({node.target})"
        return ""

    def _refusal_of_source(self, ref: Ref | None) -> str:
        if ref is None:
            return "an input that is not a tensor"
        if ref.kind == "param":
            return f"parameter {ref.name!r}"
        value = self.buffers[ref.name] if ref.kind == "buffer" else self.leaves[ref.index]
        if isinstance(value, FakeTensor) or value.is_meta:
            return f"an example without values ({ref.kind} on the meta device)"
        return ""

    def constant(self, node: Node) -> Tensor | None:
        """Return the real tensor that a ``get_attr`` node reads."""
        mode = get_proxy_mode()
        value: Any = None if mode is None else getattr(mode.tracer.root, str(node.target), None)
        for traced, real in self.constants:
            if value is traced:
                value = real
        return value if type(value) in (Tensor, nn.Parameter) and not value.is_meta else None


def computation(node: Node) -> list[Node]:
    """Return the nodes that compute ``node``, in order: operands, and writes into them."""
    # Backwards, so that only writes before the use of a storage count. ``node`` itself is read now,
    # so all writes since it was made count, through whatever view.
    wanted, storages = {node}, {storage_of(node)} - {None}
    needed = []
    for each in reversed(node.graph.nodes):
        if each in wanted or any(storage_of(x) in storages for x in written_operands(each)):
            needed.append(each)
            wanted.update(each.all_input_nodes)
            storages |= {storage_of(x) for x in each.all_input_nodes} - {None}
    return needed[::-1]


def storage_of(node: Node) -> int | None:
    """Return a number that is equal for traced values that share memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def is_under_autocast(parts: Sequence[Node]) -> bool:
    """Return whether a floating value of ``parts`` is computed inside an autocast of the model."""
    # Before a call, only the caller's own autocast is active.
    depth, inside = 0, set()
    for node in parts[-1].graph.nodes:
        depth += (node.target is _enter_autocast) - (node.target is _exit_autocast)
        if depth:
            inside.add(node)
    values = (node.meta.get("val") for node in parts if node in inside)
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in values)


def extracted(node: Node, parts: Sequence[Node], sources: Sources) -> NumberRead:
    """Copy ``parts`` into a separate graph, with names that do not depend on their origin."""
    graph, root = Graph(), nn.Module()
    copies: dict[Node, Node] = {}
    inputs = [part for part in parts if part.op == "placeholder"]
    for index, part in enumerate(inputs):
        copies[part] = graph.placeholder(f"source_{index}")
    for part in parts:
        if part.op == "get_attr":
            setattr(root, str(part.target), sources.constant(part))
            copies[part] = graph.get_attr(str(part.target))
        elif part.op == "call_function":
            copies[part] = graph.node_copy(part, copies.__getitem__)
            copies[part]._rename("value")
    graph.output(copies[node])
    refs = [sources.refs[part] for part in inputs]
    names = tuple(ref.index if ref.kind == "input" else ref.name for ref in refs)
    writes = any(map(mutates, parts))
    return NumberRead(user_line(), "", GraphModule(root, graph), names, writes)
