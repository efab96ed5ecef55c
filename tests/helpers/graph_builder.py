"""Small FX graphs written by hand, with the metadata that passes write."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from sp_compiler.base.placement import Placement
from sp_compiler.ir.rewriting import fake_value

aten = torch.ops.aten
convert = torch.ops.sp_compiler.convert.default
_MODE = FakeTensorMode()


class GraphBuilder:
    """Appends nodes to ``graph`` and fills their ``val``; keywords set other entries of meta."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(
        self, name: str, *shape: int, dtype: torch.dtype = torch.float32, **meta: str
    ) -> Node:
        node = self.graph.placeholder(name)
        with _MODE:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return _tag(node, meta)

    def call(self, target: Any, *args: Any, name: str | None = None, **meta: str) -> Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = fake_value(target, args, {})
        return _tag(node, meta)

    def output(self, *values: Any) -> Graph:
        self.graph.output(values)
        self.graph.lint()
        return self.graph


def text(graph: Graph) -> list[str]:
    """``name = operator(operands)``, one line a call."""
    return [
        f"{node.name} = {node.target.__name__.split('.')[0]}"
        f"({', '.join(source.name for source in node.all_input_nodes)})"
        for node in graph.nodes
        if node.op == "call_function"
    ]


def _tag(node: Node, meta: dict[str, str]) -> Node:
    node.meta.update(meta)
    if "placement" in meta:
        node.meta["placement"] = Placement.parse(meta["placement"])
    return node
