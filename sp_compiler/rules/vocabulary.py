"""Lookups and losses over a sharded vocabulary, which are lowered to their own operators."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.graph import arguments
from sp_compiler.placement import I, P, R, S
from sp_compiler.rules.strategies import Strategy

_aten = torch.ops.aten
_BY_VOCABULARY = {
    _aten.embedding.default: Strategy((S(0), R), (P,), vocabulary=True),
    _aten.cross_entropy_loss.default: Strategy((S(1), R), (I,), vocabulary=True),
}


def vocabulary_strategies(node: Node, world: int) -> list[Strategy]:
    """The one way over a sharded vocabulary, where ``node`` has it."""
    by_vocabulary = node.target in _BY_VOCABULARY and not vocabulary_obstacle(node, world)
    return [_BY_VOCABULARY[node.target]] if by_vocabulary else []


def has_vocabulary(node: Node) -> bool:
    """Whether ``node`` is a lookup or a loss over a vocabulary."""
    return node.target in _BY_VOCABULARY


def vocabulary_obstacle(node: Node, world: int) -> str:
    """Why a lookup or a loss cannot run on a sharded vocabulary; "" where it can."""
    args = arguments(node)
    if node.target is _aten.embedding.default:
        size = args["weight"].meta["val"].shape[0]
        if args["scale_grad_by_freq"]:
            return "it scales gradients by how often an entry is looked up"
        return _indivisible(size, world)
    shape = args["self"].meta["val"].shape
    if len(shape) != 2:
        return f"its logits have {len(shape)} dims, and only rows of logits are sharded by class"
    if args["target"].meta["val"].dtype.is_floating_point:
        return "its targets are probabilities"
    if args["weight"] is not None:
        return "it weighs the classes"
    if args["label_smoothing"] != 0.0:
        return "it smooths the labels"
    return _indivisible(shape[1], world)


def _indivisible(size: int, world: int) -> str:
    return f"its {size} classes do not divide by {world}" if size % world else ""
