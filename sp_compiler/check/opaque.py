"""How the compiler's own operators may be run: they depend on the rank, so they declare it.

The declarations are trusted here; each operator has its own numeric tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.ir.fx import arguments, placements_of
from sp_compiler.ops.convert import conversion_between
from sp_compiler.rules.strategies import Strategy

sp = torch.ops.sp_compiler


def as_value(placement: Placement) -> Placement:
    """What the numbers are: R and I are the same, and one segment is none."""
    if placement.is_replicated:
        return R
    if placement.kind == "S" and len(placement.segments) == 1:
        return S(placement.dim)
    return placement


def opaque_strategies(node: Node, world_size: int) -> list[Strategy] | None:
    """Every way to run ``node``; ``None`` where it is not one of the compiler's operators.

    An empty list: its own arguments contradict each other.
    """
    found = _DECLARED.get(node.target)
    if found is None:
        return None
    if found is not _dropout and arguments(node)["world_size"] != world_size:
        return []
    return found(node, world_size)


def _convert(node: Node, world_size: int) -> list[Strategy]:
    pair = placements_of(node)
    assert pair is not None
    if conversion_between(*pair) is None:
        return []
    source, target = map(as_value, pair)
    return [Strategy((source,), (target,))]


def _dropout(node: Node, world_size: int) -> list[Strategy]:
    """Whole tensors drop the same elements on every rank; a shard is told where it lies."""
    args = arguments(node)
    found = []
    if args["world_size"] == 1:
        is_mask = node.target is sp.dropout_mask.default
        found += [Strategy((R, R), (R,)), Strategy((P, R), (R if is_mask else P,))]
    if args["world_size"] == world_size:
        shard = S(args["dim"] % max(1, node.meta["val"].dim()))
        found.append(Strategy((shard, R), (shard,)))
    return found


def _wait(node: Node, world_size: int) -> list[Strategy]:
    """What has arrived is what was sent for."""
    pair = placements_of(arguments(node)["x"])
    if pair is None:
        return []
    arrived = as_value(pair[1])
    return [Strategy((arrived,), (arrived,))]


def _rows(node: Node, world_size: int) -> list[Strategy]:
    """Whole values; the padding of a partial sum adds up to the padding of the sum."""
    return [Strategy((R,), (R,)), Strategy((P,), (P,))]


def _vocab_embedding(node: Node, world_size: int) -> list[Strategy]:
    return [Strategy((S(0), R), (P,))]


def _vocab_embedding_backward(node: Node, world_size: int) -> list[Strategy]:
    return [Strategy((R, R), (S(0),))]


def _vocab_nll(node: Node, world_size: int) -> list[Strategy]:
    return [Strategy((S(1), R), (R, R))]


def _vocab_nll_backward(node: Node, world_size: int) -> list[Strategy]:
    return [Strategy((R, S(1), R, R), (S(1),))]


_DECLARED: dict[object, Callable[[Node, int], list[Strategy]]] = {
    sp.convert.default: _convert,
    sp.wait.default: _wait,
    sp.dropout.default: _dropout,
    sp.dropout_mask.default: _dropout,
    sp.pad_rows.default: _rows,
    sp.pad_rows_with_zeros.default: _rows,
    sp.cut_rows.default: _rows,
    sp.vocab_embedding.default: _vocab_embedding,
    sp.vocab_embedding_backward.default: _vocab_embedding_backward,
    sp.vocab_nll.default: _vocab_nll,
    sp.vocab_nll_backward.default: _vocab_nll_backward,
}
