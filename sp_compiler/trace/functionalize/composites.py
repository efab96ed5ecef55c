"""Composite operators: the operators that one call runs, as a graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_cia_op
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from sp_compiler.ir.fx import mutates


def is_composite(target: Any) -> bool:
    """Return whether an operator is implemented by other operators only, on every device."""
    return isinstance(target, OpOverload) and _is_cia_op(target)


def call_signature(node: Node) -> Hashable:
    """Return a key that is equal for equal calls on operands of equal layout, dtype and device."""
    inputs = node.all_input_nodes
    arguments = map_arg((node.args, node.kwargs), lambda source: f"%{inputs.index(source)}")
    # Strides and offset as well: they decide whether ``contiguous`` copies.
    layouts = [
        (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in pytree.tree_leaves([source.meta["val"] for source in inputs])
    ]
    # As text: an open size has no hash.
    return node.target, repr(arguments), repr(layouts)


def trace_call(node: Node, mode: FakeTensorMode) -> Graph:
    """Return a functional graph of the operators that one call runs, with its input nodes as
    placeholders."""
    inputs = node.all_input_nodes

    def call(*values: Any) -> Any:
        known = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        return node.target(*args, **kwargs)

    with mode, enable_python_dispatcher():  # decomposes in Python, as the export does
        values = [
            pytree.tree_map_only(Tensor, Tensor.detach, source.meta["val"]) for source in inputs
        ]
        graph = make_fx(call)(*values).graph
        # Some composites write into tensors that they make, such as feature dropout into its noise.
        # Functionalize only those: under functionalize, others are decomposed differently (dropout
        # into operators that draw a mask).
        if any(map(mutates, graph.nodes)):
            graph = make_fx(torch.func.functionalize(call))(*values).graph
        return graph
