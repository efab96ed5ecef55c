"""Lookups and losses over a sharded vocabulary, which are lowered to their own operators."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.base.placement import I, P, R, shard_of
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.rules.strategies import Strategy

_aten = torch.ops.aten
# A lookup finds most tokens on other ranks: a partial sum. A loss is reduced inside, so equal.
_RESULTS = {_aten.embedding.default: P, _aten.cross_entropy_loss.default: I}


def vocabulary_strategies(node: Node, world_size: int) -> list[Strategy]:
    """The one way over a sharded vocabulary, where ``node`` has it."""
    if not has_vocabulary(node) or vocabulary_obstacle(node):
        return []
    # Rows of a table, columns of logits.
    dim = 0 if node.target is _aten.embedding.default else 1
    size = tensor_operands(node)[0].meta["val"].shape[dim]
    sharded = shard_of(size, dim, world_size)
    return [Strategy((sharded, R), (_RESULTS[node.target],), lowering="vocabulary")]


def has_vocabulary(node: Node) -> bool:
    """Whether ``node`` is a lookup or a loss over a vocabulary."""
    return node.target in _RESULTS


def vocabulary_obstacle(node: Node) -> str:
    """Why a lookup or a loss cannot run on a sharded vocabulary; "" where it can."""
    args = arguments(node)
    if node.target is _aten.embedding.default:
        # A rank would count the lookups of its own tokens alone.
        scaled = "it scales gradients by how often an entry is looked up"
        return scaled if args["scale_grad_by_freq"] else ""
    shape = args["self"].meta["val"].shape
    if len(shape) != 2:
        return f"its logits have {len(shape)} dims, and only rows of logits are sharded by class"
    if args["target"].meta["val"].dtype.is_floating_point:
        return "its targets are probabilities"
    if args["weight"] is not None:
        return "it weighs the classes"
    if args["label_smoothing"] != 0.0:
        return "it smooths the labels"
    return ""
