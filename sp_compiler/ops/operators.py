"""Operators that stay opaque while a region is traced, with their gradients.

They stand for what depends on the rank: conversions between placements, vocabulary-parallel lookups
and losses, counter-based dropout. The generated code calls the method of the same name of
:class:`sp_compiler.ops.communicator.Communicator`, so no rank and no process group is ever
baked into a graph; executing one of these operators itself is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import Placement

_ONLY_TRACED = "sp_compiler operators are only traced; the generated code calls the Communicator"


@torch.library.custom_op("sp_compiler::convert", mutates_args=())
def convert(x: Tensor, src: str, dst: str, world_size: int) -> Tensor:
    """The value ``x``, placed as ``src``, placed as ``dst``; shapes are those of one rank."""
    raise NotImplementedError(_ONLY_TRACED)


@convert.register_fake
def _(x: Tensor, src: str, dst: str, world_size: int) -> Tensor:
    source, target = Placement.parse(src), Placement.parse(dst)
    shape = list(source.global_shape(tuple(x.shape), world_size))
    if target.kind == "S":  # a wrong conversion is for the checks to refuse, not for its shape
        shape[target.dim] = (shape[target.dim] + target.padding(world_size)) // world_size
    return x.new_empty(shape)


def _convert_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.src, ctx.dst, ctx.world_size = inputs


def _convert_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    src, dst = Placement.parse(ctx.src).dual, Placement.parse(ctx.dst).dual
    return convert(grad.contiguous(), str(dst), str(src), ctx.world_size), None, None, None


convert.register_autograd(_convert_backward, setup_context=_convert_setup)


@torch.library.custom_op("sp_compiler::wait", mutates_args=())
def wait(x: Tensor, world_size: int) -> Tensor:
    """``x``, a :func:`convert` that has only been started, when it has arrived."""
    raise NotImplementedError(_ONLY_TRACED)


@wait.register_fake
def _(x: Tensor, world_size: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("sp_compiler::pad_rows", mutates_args=())
def pad_rows(x: Tensor, world_size: int) -> Tensor:
    """``x`` with copies of its last row behind it, so that dim 0 divides by ``world_size``.

    The copies make no NaN, and no gradient flows from them.
    """
    raise NotImplementedError(_ONLY_TRACED)


@pad_rows.register_fake
def _(x: Tensor, world_size: int) -> Tensor:
    return x.new_empty(((x.shape[0] + world_size - 1) // world_size * world_size, *x.shape[1:]))


@torch.library.custom_op("sp_compiler::cut_rows", mutates_args=())
def cut_rows(x: Tensor, rows: int, world_size: int) -> Tensor:
    """The first ``rows`` rows of ``x``, which is padded as by :func:`pad_rows`."""
    raise NotImplementedError(_ONLY_TRACED)


@cut_rows.register_fake
def _(x: Tensor, rows: int, world_size: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _pad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.world_size = inputs
    ctx.rows = x.shape[0]


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return cut_rows(grad, ctx.rows, ctx.world_size), None


def _cut_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.world_size = inputs


def _cut_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return pad_rows_with_zeros(grad, ctx.world_size), None, None


@torch.library.custom_op("sp_compiler::pad_rows_with_zeros", mutates_args=())
def pad_rows_with_zeros(x: Tensor, world_size: int) -> Tensor:
    """As :func:`pad_rows` with zeros: the gradient of :func:`cut_rows`."""
    raise NotImplementedError(_ONLY_TRACED)


@pad_rows_with_zeros.register_fake
def _(x: Tensor, world_size: int) -> Tensor:
    return x.new_empty(((x.shape[0] + world_size - 1) // world_size * world_size, *x.shape[1:]))


pad_rows.register_autograd(_pad_backward, setup_context=_pad_setup)
cut_rows.register_autograd(_cut_backward, setup_context=_cut_setup)


@torch.library.custom_op("sp_compiler::vocab_embedding", mutates_args=())
def vocab_embedding(weight: Tensor, ids: Tensor, num_rows: int, world_size: int) -> Tensor:
    """Rows of a vocabulary-sharded table of ``num_rows`` v, which may be padded.

    ``weight`` is S(0) (v/t, h), ``ids`` replicated; P (*ids, h).
    """
    raise NotImplementedError(_ONLY_TRACED)


@vocab_embedding.register_fake
def _(weight: Tensor, ids: Tensor, num_rows: int, world_size: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@torch.library.custom_op("sp_compiler::vocab_embedding_backward", mutates_args=())
def vocab_embedding_backward(grad: Tensor, ids: Tensor, num_rows: int, world_size: int) -> Tensor:
    """Gradient (num_rows, h), placed S(0), of the table of :func:`vocab_embedding`."""
    raise NotImplementedError(_ONLY_TRACED)


@vocab_embedding_backward.register_fake
def _(grad: Tensor, ids: Tensor, num_rows: int, world_size: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]))


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, _, ctx.world_size = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return vocab_embedding_backward(grad, ids, ctx.num_rows, ctx.world_size), None, None, None


vocab_embedding.register_autograd(_embedding_backward, setup_context=_embedding_setup)


@torch.library.custom_op("sp_compiler::vocab_nll", mutates_args=())
def vocab_nll(
    logits: Tensor, target: Tensor, ignore_index: int, classes: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of each row over a sharded vocabulary of ``classes`` v.

    ``logits`` (n, v/t), which may be padded, is S(1), ``target`` (n,) replicated; returns the loss
    of each row (0 where the target is ``ignore_index``) and the logsumexp of each row, both (n,)
    and invariant. Costs two small all-reduces (the row maximum; the sum of exponentials with the
    target's logit).
    """
    raise NotImplementedError(_ONLY_TRACED)


@vocab_nll.register_fake
def _(
    logits: Tensor, target: Tensor, ignore_index: int, classes: int, world_size: int
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(target.shape), logits.new_empty(target.shape)


@torch.library.custom_op("sp_compiler::vocab_nll_backward", mutates_args=())
def vocab_nll_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    ignore_index: int,
    classes: int,
    world_size: int,
) -> Tensor:
    """Gradient of :func:`vocab_nll` for its logits: (softmax - onehot) * grad; no communication."""
    raise NotImplementedError(_ONLY_TRACED)


@vocab_nll_backward.register_fake
def _(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


def _nll_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def _nll_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    return vocab_nll_backward(grad, *saved, *ctx.rest), None, None, None, None


vocab_nll.register_autograd(_nll_backward, setup_context=_nll_setup)


@torch.library.custom_op("sp_compiler::dropout_mask", mutates_args=())
def dropout_mask(x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int) -> Tensor:
    """Bool mask of what survives dropout, like ``x``; see :mod:`sp_compiler.ops.dropout_counter`.

    ``x`` is one rank's part, sharded on ``dim`` over ``world_size`` ranks (1: replicated). The mask
    is a pure function of (seed, site, index of the element in the whole tensor).
    """
    raise NotImplementedError(_ONLY_TRACED)


@dropout_mask.register_fake
def _(x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


@torch.library.custom_op("sp_compiler::dropout", mutates_args=())
def dropout(x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int) -> Tensor:
    """``x * dropout_mask(x, ...) / (1 - p)`` without a mask in memory; its own gradient."""
    raise NotImplementedError(_ONLY_TRACED)


@dropout.register_fake
def _(x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int) -> Tensor:
    return torch.empty_like(x)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return dropout(grad, seed, *ctx.rest), None, None, None, None, None


dropout.register_autograd(_dropout_backward, setup_context=_dropout_setup)
