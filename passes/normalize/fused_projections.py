"""Fused projections (q, k, v in one matmul) as splits of its last dim.

From a split, sharding derives the segments of the weight: q, k and v must each be sharded over all
ranks, not their concatenation.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import calls, is_call, shape_of
from sp_compiler.ir.rewriting import insert_call, replace_call, replace_with
from sp_compiler.ir.symbolic import is_open, same_shape

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_MOVES = (
    _aten.transpose.int,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.reshape.default,
)


def split_packed(graph: Graph) -> None:
    """Rewrite in place how ``nn.MultiheadAttention`` splits q, k and v.

    ``reshape(x, (..., n, e))`` -> moves of dims -> ``select(_, dim of n, i)``
    becomes ``split_with_sizes(x, [e] * n, -1)[i]``, where the moves leave the other dims in order.
    """
    splits: dict[Node, Node] = {}  # one for the selects of q, k and v
    for node in calls(graph, _aten.select.int):
        unflattened = _packed_source(node)
        if unflattened is None:
            continue
        x = unflattened.args[0]
        assert isinstance(x, Node)
        count, width = shape_of(unflattened)[-2:]
        if unflattened not in splits:
            splits[unflattened] = insert_call(
                unflattened,
                _aten.split_with_sizes.default,
                (x, [width] * count, -1),
                origin=_ORIGIN,
            )
        index = node.args[2] % count
        part = insert_call(
            node, operator.getitem, (splits[unflattened], index), origin=_ORIGIN, name="part"
        )
        # The moves may have added dims of size 1.
        if not same_shape(shape_of(part), shape_of(node)):
            size = list(shape_of(node))
            part = insert_call(node, _aten.reshape.default, (part, size), origin=_ORIGIN)
        replace_with(node, part)


def split_slices(graph: Graph) -> None:
    """``y[..., :a]``, ``y[..., a:b]``... that partition a matmul's result -> ``split_with_sizes``.

    In place. Slices of other values (such as halves of a head for rotary embeddings) do not change.
    """
    for product in calls(graph, _aten.linear.default, _aten.matmul.default, _aten.mm.default):
        slices = [
            user
            for user in product.users
            if is_call(user, _aten.slice.Tensor) and user.args[1] == -1 and len(user.args) == 4
        ]
        # A feature dim is never open: open sizes belong to tokens, which are never fused.
        if not slices or any(map(is_open, tree_leaves([node.args[2:] for node in slices]))):
            continue
        # Sorted: a model may take the values before the keys.
        slices.sort(key=lambda node: node.args[2:])
        ends = [0, *(node.args[3] for node in slices)]
        # Each starts where the one before ends, and the last ends with the dim.
        if [node.args[2] for node in slices] != ends[:-1] or ends[-1] != shape_of(product)[-1]:
            continue
        sizes = [shape_of(node)[-1] for node in slices]
        args = (product, sizes, -1)
        split = insert_call(product.next, _aten.split_with_sizes.default, args, origin=_ORIGIN)
        for index, node in enumerate(slices):
            replace_call(node, operator.getitem, (split, index), origin=_ORIGIN, name="part")


def _packed_source(select: Node) -> Node | None:
    """Return the ``reshape`` whose unflattened dim ``select`` indexes, or ``None``."""
    chain: list[Node] = []
    node = select.args[0]
    while is_call(node, *_MOVES):
        assert isinstance(node, Node)
        if _unflattens_last(node):
            dims = _moved_dims(node, chain[::-1])
            packed = len(shape_of(node)) - 2
            if dims is None or dims[select.args[1]] != packed:
                return None
            # The other dims must be in their first order: else the part would be transposed.
            rest = [dim for dim in dims if dim is not None and dim != packed]
            return node if rest == sorted(rest) else None
        chain.append(node)
        node = node.args[0]
    return None


def _unflattens_last(node: Node) -> bool:
    """Return whether the node is ``reshape(x, (*x.shape[:-1], n, e))`` with n > 1."""
    if not is_call(node, _aten.reshape.default):
        return False
    source, result = shape_of(node.args[0]), shape_of(node)
    return (
        len(result) == len(source) + 1 and same_shape(result[:-2], source[:-1]) and result[-2] > 1
    )


def _moved_dims(start: Node, moves: list[Node]) -> list[int | None] | None:
    """Return for each dim after ``moves`` its dim in ``start``; ``None`` for size 1.

    The result is ``None`` if a reshape merges or splits dims.
    """
    dims: list[int | None] = [d if n > 1 else None for d, n in enumerate(shape_of(start))]
    for move in moves:
        if is_call(move, _aten.transpose.int):
            first, second = move.args[1:]
            dims[first], dims[second] = dims[second], dims[first]
        elif is_call(move, _aten.permute.default):
            dims = [dims[dim] for dim in move.args[1]]
        else:  # a reshape or unsqueeze may only add and remove dims of size 1
            kept = iter([dim for dim in dims if dim is not None])
            sizes = shape_of(move)
            kept_sizes = [shape_of(start)[d] for d in dims if d is not None]
            if not same_shape([n for n in sizes if n > 1], kept_sizes):
                return None
            dims = [next(kept) if size > 1 else None for size in sizes]
    return dims
