"""Lookups in and losses over a sharded vocabulary, which are replaced by custom operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from sp_compiler.base.placement import I, P, R, shard_of
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.rules.strategies import Strategy

_aten = torch.ops.aten
# A lookup finds most tokens on other ranks: a partial sum. A loss is reduced inside: invariant.
_RESULTS = {_aten.embedding.default: P, _aten.cross_entropy_loss.default: I}
# Not softmax: the next operator picks or mixes the classes of probabilities (experts, attention),
# which would be gathered after all; and the exponential of padding may be infinite.
_OF_ROWS = (_aten.logsumexp.default, _aten.log_softmax.int)


def vocabulary_strategies(
    node: Node, world_size: int, is_feature: Callable[[int], bool]
) -> list[Strategy]:
    """Return the strategy over a sharded vocabulary, if ``node`` has one.

    Args:
        node: any operator.
        world_size: number of ranks.
        is_feature: whether a dim of the first operand comes from a parameter's dim.
    """
    if node.target in _OF_ROWS:
        return _strategies_of_rows(node, world_size, is_feature)
    if not has_vocabulary(node) or vocabulary_obstacle(node):
        return []
    operands = tensor_operands(node)
    # Dim 0 of a table, dim 1 of logits.
    dim = 0 if node.target is _aten.embedding.default else 1
    sharded = shard_of(operands[0].meta["val"].shape[dim], dim, world_size)
    placements = (sharded, *[R] * (len(operands) - 1))
    return [Strategy(placements, (_RESULTS[node.target],), lowering="vocabulary")]


def _strategies_of_rows(
    node: Node, world_size: int, is_feature: Callable[[int], bool]
) -> list[Strategy]:
    shape = arguments(node)["self"].meta["val"].shape
    dims, last = arguments(node)["dim"], len(shape) - 1
    if arguments(node).get("keepdim"):
        return []  # normalization leaves none
    # Not the keys of attention: they are tokens, which are sharded only by rows.
    if dims not in (-1, last, [-1], [last]) or last < 0 or not is_feature(last):
        return []
    sharded = shard_of(shape[last], last, world_size)
    # With one class per rank, the gradient of logsumexp has no sum over the classes in the traced
    # graph, because that dim has size 1.
    if node.target is _aten.log_softmax.int and shape[last] <= world_size:
        return []
    result = I if node.target is _aten.logsumexp.default else sharded
    return [Strategy((sharded,), (result,), lowering="vocabulary")]


def has_vocabulary(node: Node) -> bool:
    """Return whether ``node`` is a lookup or a loss over a vocabulary."""
    return node.target in _RESULTS


def vocabulary_obstacle(node: Node) -> str:
    """Return why a lookup or a loss cannot run on a sharded vocabulary; "" if it can."""
    args = arguments(node)
    if node.target is _aten.embedding.default:
        # A rank would count only the lookups of its own tokens.
        scaled = "it scales gradients by how often an entry is looked up"
        return scaled if args["scale_grad_by_freq"] else ""
    shape = args["self"].meta["val"].shape
    if len(shape) != 2:
        return f"its logits have {len(shape)} dims, and only rows of logits are sharded by class"
    return ""
