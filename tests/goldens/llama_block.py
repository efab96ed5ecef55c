"""The block of a small HuggingFace Llama, compiled for two ranks, as text after every pass."""

from __future__ import annotations

import functools

import torch
from torch.fx import Graph

from sp_compiler.base.provenance import layer_of
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.snapshot import Snapshot, region_of
from sp_compiler.ir.text import render, render_node
from sp_compiler.options import CompileOptions, Recompute
from tests.models import zoo

BLOCK = "LlamaDecoderLayer"
_FIRST_LAYER = "model.layers.0"


@functools.cache
def compiled(recompute: Recompute) -> CompiledProgram:
    """Two layers, four heads over two key/value heads, no dropout; compiled once per policy."""
    model, inputs = zoo.build("llama", dtype=torch.float32), zoo.inputs("llama", batch=2, seq=8)
    return build(model, (), inputs, CompileOptions(tp=2, recompute=recompute))


def stage_text(stage: Snapshot) -> str:
    """The graphs of the block; before it is a region of its own, its first use in the model."""
    graphs = {name: graph for name, graph in stage.graphs.items() if region_of(name) == BLOCK}
    if graphs:
        return "\n\n".join(f"{name}:\n{render(graph)}" for name, graph in graphs.items())
    (graph,) = stage.graphs.values()
    return f"{_FIRST_LAYER}:\n{_render_layer(graph)}"


def _render_layer(graph: Graph) -> str:
    """Like :func:`render`; values from outside the layer, its parameters too, keep their names."""
    layer = [node for node in graph.nodes if layer_of(node).path == _FIRST_LAYER]
    numbers = {node: f"%{number}" for number, node in enumerate(layer)}
    return "\n".join(
        render_node(node, lambda value: numbers.get(value, f"%{value.name}")) for node in layer
    )


def code_text(recompute: Recompute) -> str:
    """The generated class of the block."""
    return compiled(recompute).regions[BLOCK].source
