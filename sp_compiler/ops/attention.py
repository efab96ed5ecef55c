"""Attention with a mask and dropout as one operator.

On a GPU one kernel computes it without scores in memory (:mod:`sp_compiler.ops.gpu.attention`); the
operators below are its definition, for any device and for simulated ranks. The softmax is taken
over all keys that the mask allows, and dropout applied to what it returns::

    probs = softmax(where(mask, scale * query @ key^T, -inf))
    context = dropout(probs) @ value

A query that may see no key has the context 0, as in fused attention of PyTorch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.placement import Placement, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.counter import is_plain
from sp_compiler.ops.dropout import dropout
from sp_compiler.ops.registry import Arguments, Gradient, Operator, Typing, register

_sp = torch.ops.sp_compiler


def dropout_attention(  # noqa: PLR0913 - those of the operator
    tp: Communicator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    p: float,
    site: int,
    dim: int,
    world_size: int,
    first_row: int = 0,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the context (b, a, s, w) and the logsumexp of the scores (b, a, s).

    Args:
        tp: communicator of this rank.
        query: (b, a, s, d).
        key: (b, a, l, d).
        value: (b, a, l, w).
        mask: bool, broadcast to (b, a, s, l): True where a query sees a key; ``None``: everywhere.
        seed: 0-dim int64; ``None`` for no dropout.
        scale: factor of the products of queries and keys.
        p, site, dim, world_size, first_row, padding: as for
            :func:`~sp_compiler.ops.dropout.dropout`, for the probabilities (b, a, s, l);
            without ``seed`` they have no effect.

    In memory, queries come before heads, as (b, s, a, w), so that merging the heads takes no copy.
    The logsumexp is float32, or float64 if ``query`` is.
    """
    place = p, site, dim, world_size, first_row, padding
    if (kernels := _kernels(tp, query)) is not None:
        made = kernels.forward(tp.rank, (query, key, value, mask, seed), scale, *place)
        if made is not None:
            return made
    scores = _scores(query, key, mask, scale)
    logsumexp = scores.logsumexp(-1)
    probs = _probabilities(scores, logsumexp)
    if seed is not None:
        probs = dropout(tp, probs, seed, *place)
    return _queries_first(torch.matmul(probs.to(value.dtype), value)), logsumexp


def dropout_attention_backward(  # noqa: PLR0913 - those of the operator
    tp: Communicator,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    p: float,
    site: int,
    dim: int,
    world_size: int,
    first_row: int = 0,
    padding: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``query``, ``key`` and ``value``, from that of the context.

    The others are arguments and results of :func:`dropout_attention`. The dropout is drawn again.
    """
    place = p, site, dim, world_size, first_row, padding
    if (kernels := _kernels(tp, query)) is not None:
        of_forward, of_backward = (query, key, value, mask, seed), (grad, context, logsumexp)
        made = kernels.backward(tp.rank, of_backward, of_forward, scale, *place)
        if made is not None:
            return made
    scores = _scores(query, key, mask, scale)
    dropped = probs = _probabilities(scores, logsumexp)
    grad_probs = torch.matmul(grad, value.transpose(-2, -1)).to(probs.dtype)
    if seed is not None:
        dropped, grad_probs = (dropout(tp, x, seed, *place) for x in (probs, grad_probs))
    # The sum of each row of probabilities times its gradient: with dropout, too.
    total = (grad.to(probs.dtype) * context).sum(-1, keepdim=True)
    grad_scores = (probs * (grad_probs - total) * scale).to(query.dtype)
    grads = (
        torch.matmul(grad_scores, key),
        torch.matmul(grad_scores.transpose(-2, -1), query),
        torch.matmul(dropped.to(grad.dtype).transpose(-2, -1), grad),
    )
    return _queries_first(grads[0]), _queries_first(grads[1]), _queries_first(grads[2])


def _queries_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _kernels(tp: Communicator, query: Tensor) -> Any:
    """Return the module with the kernels of a GPU; ``None`` where there are none."""
    if not (query.is_cuda and is_plain(tp.rank, query)):
        return None
    from sp_compiler.ops.gpu import attention

    return attention


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the scores of all keys, in float32 or float64; -inf where the mask forbids one."""
    product = torch.matmul(query, key.transpose(-2, -1))
    scores = product.to(_exact(query.dtype)) * scale
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    # 0 for a query without any key. (Not the exponential of scores less ``logsumexp``, a difference
    # in which large scores leave few digits.)
    return scores.softmax(-1).masked_fill((logsumexp == -math.inf).unsqueeze(-1), 0.0)


# What graphs need to know about them.


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *rows, _ = query.shape
    context = _fake_queries_first(query, (*rows, value.shape[-1]))
    return context, query.new_empty(rows, dtype=_exact(query.dtype))


def _fake_queries_first(x: Tensor, shape: Sequence[int]) -> Tensor:
    samples, heads, queries, width = shape
    return x.new_empty((samples, queries, heads, width)).transpose(1, 2)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grads = (_fake_queries_first(x, x.shape) for x in (query, key, value))
    return next(grads), next(grads), next(grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, mask, seed)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    grads = _sp.dropout_attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * (2 + len(ctx.rest))


def _type_attention(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((cut, cut, cut, *others), (cut, cut)) for cut, others in _typings(args, world_size)]


def _type_backward(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((cut,) * 6 + others, (cut,) * 3) for cut, others in _typings(args, world_size)]


def _typings(args: Arguments, world_size: int) -> list[tuple[Placement, tuple[Placement, ...]]]:
    """Return placements of tensors with samples and heads, each with those of mask and seed."""
    seed = [R] if args["seed"] is not None else []
    masks = [] if args["mask"] is None else [args["mask"]]
    typings: list[tuple[Placement, tuple[Placement, ...]]] = []
    if args["seed"] is None or args["world_size"] == 1:
        typings.append((R, (*[R] * len(masks), *seed)))
    for dim in (0, 1):
        if args["seed"] is None or (args["world_size"] == world_size and args["dim"] == dim):
            of_masks = [_cuts_of_mask(x, args["query"], dim) for x in masks]
            typings += [(S(dim), (*own, *seed)) for own in itertools.product(*of_masks)]
    return typings


def _cuts_of_mask(mask: Node, query: Node, dim: int) -> list[Placement]:
    """Return the placements of a mask where samples or heads, which are ``dim``, are sharded."""
    size, count = (x.meta["val"].shape[dim] for x in (mask, query))
    if size != 1:
        return [S(dim)]
    # A mask that all share; or, if a rank has one sample or head, the mask of that one.
    return [R, S(dim)] if count == 1 else [R]


def _scratch(args: Arguments, result: Any) -> int:
    query, key = args["query"].meta["val"], args["key"].meta["val"]
    rows = query.numel() // query.shape[-1]
    if query.is_cuda:
        # Keys of the rows of a mask, and a copy of the context or a value per row.
        return 24 * rows + args["value"].meta["val"].element_size() * rows * query.shape[-1]
    return 4 * _exact(query.dtype).itemsize * rows * key.shape[-2]


_PLACE = (
    "float scale, float p, SymInt site, SymInt dim, SymInt world_size, SymInt first_row=0, "
    "SymInt padding=0"
)
DROPOUT_ATTENTION = register(
    Operator(
        name="dropout_attention",
        schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, "
        f"Tensor? seed, {_PLACE}) -> (Tensor, Tensor)",
        kernel=dropout_attention,
        fake=_fake,
        typings=_type_attention,
        gradient=Gradient(_save, _backward),
        result_names=("context", "logsumexp"),
        compiled=True,
        scratch_bytes=_scratch,
    )
)
DROPOUT_ATTENTION_BACKWARD = register(
    Operator(
        name="dropout_attention_backward",
        schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor context, "
        "Tensor logsumexp, Tensor? mask, Tensor? seed, "
        f"{_PLACE}) -> (Tensor, Tensor, Tensor)",
        kernel=dropout_attention_backward,
        fake=_fake_backward,
        typings=_type_backward,
        result_names=("grad_query", "grad_key", "grad_value"),
        compiled=True,
        scratch_bytes=_scratch,
    )
)
