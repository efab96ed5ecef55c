"""Regions of a graph of ``torch.export`` that have their own grad mode or autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def attribute_of(module: GraphModule, node: Node) -> Any:
    """Return the attribute that the ``get_attr`` node reads; ``None`` if it does not exist."""
    return getattr(module, str(node.target), None)


def body_of(module: GraphModule, node: Node) -> GraphModule:
    """Return the subgraph that ``node`` runs."""
    (attribute,) = [arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
    body = attribute_of(module, attribute)
    assert isinstance(body, GraphModule)
    return body


def operands_of(node: Node, body: GraphModule) -> tuple[Any, ...]:
    """Return the arguments that ``node`` passes to the placeholders of ``body``: its last ones."""
    num_inputs = len(body.graph.find_nodes(op="placeholder"))
    return node.args[len(node.args) - num_inputs :]
