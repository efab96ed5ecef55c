"""Losses with weights and smoothed labels, and logsumexp, over classes sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import I, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Arguments, Collective, Gradient, Operator, Typing, register
from sp_compiler.ops.vocabulary import (
    fake_logits,
    fake_losses,
    local_ids,
    log_total,
    padding_columns,
    require_inside,
    scratch_of_losses,
)

_sp = torch.ops.sp_compiler


def vocab_smoothed_nll(
    tp: Communicator,
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    ignore_index: int,
    classes: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Loss of each row over v = ``classes`` classes, with label smoothing and class weights.

    With ``weight`` w per class and smoothing e, the loss of a row with label y is ``(1 - e) w_y
    (lse - x_y) + e / v * sum_c w_c (lse - x_c)``.

    ``logits`` (n, v/t), which may be padded, is S(1), ``target`` (n,) and ``weight`` (v,)
    replicated; returns the losses (0 where the target is ``ignore_index``) and the logsumexp of
    each row, both (n,) and invariant. Costs two small all-reduces.
    """
    wanted = torch.where(target == ignore_index, 0, target)
    require_inside(tp, wanted, classes, "a loss over {} classes, as target")
    local, is_elsewhere = local_ids(tp, target, logits.shape[-1])
    # Masked, not multiplied by 0: a logit of another class may be infinite.
    picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(is_elsewhere, 0)
    # Only with smoothing: 0 times an infinite logit is not 0.
    weighed = [_weighed(tp, logits, weight, classes)] if smoothing else []
    logsumexp, picked, *weighed = log_total(tp, logits, classes, [picked, *weighed])
    losses = (1 - smoothing) * weight[wanted] * (logsumexp - picked)
    # Empty without smoothing, else one total.
    for total in weighed:
        losses = losses + smoothing / classes * (weight.sum() * logsumexp - total)
    return torch.where(target == ignore_index, 0, losses), logsumexp


def vocab_smoothed_nll_backward(
    tp: Communicator,
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    logsumexp: Tensor,
    classes: int,
    smoothing: float,
) -> Tensor:
    """Gradient of :func:`vocab_smoothed_nll` for its logits; no communication.

    For an ignored row, ``grad`` is 0 and ``target`` any class.
    """
    own = _own_weights(tp, logits, weight, classes)
    true = (1 - smoothing) * weight[target]
    # The gradient of logsumexp, which both terms have: the softmax, weighted by both.
    share = grad * (true + smoothing / classes * weight.sum())
    result = vocab_logsumexp_backward(tp, share, logits, logsumexp, classes)
    # In one operator: the product by itself would be as large as the logits.
    result.addr_(grad * (smoothing / classes), own, alpha=-1)
    local, is_elsewhere = local_ids(tp, target, logits.shape[-1])
    own_true = (grad * true).masked_fill_(is_elsewhere, 0)
    return result.scatter_add_(-1, local.unsqueeze(-1), -own_true.unsqueeze(-1))


def _own_weights(tp: Communicator, logits: Tensor, weight: Tensor, classes: int) -> Tensor:
    """Return the weights of this rank's columns; 0 for padding."""
    columns = torch.arange(logits.shape[-1], device=logits.device) + tp.rank * logits.shape[-1]
    # Clamped, because an index after the last weight would raise an error before it is masked.
    return torch.where(columns < classes, weight[columns.clamp(max=classes - 1)], 0)


def _weighed(tp: Communicator, logits: Tensor, weight: Tensor, classes: int) -> Tensor:
    """Return the weighted sum of this rank's logits per row; padding may have any value."""
    padding = padding_columns(tp, logits, classes)
    known = logits if padding is None else logits.masked_fill(padding, 0)
    return known @ _own_weights(tp, logits, weight, classes)


def vocab_logsumexp(tp: Communicator, logits: Tensor, classes: int) -> Tensor:
    """``logits.logsumexp(-1)`` over v = ``classes`` classes.

    ``logits`` (..., v/t), which may be padded, is sharded on the last dim; the result (...) is
    invariant. Costs two small all-reduces.
    """
    return log_total(tp, logits, classes, [])[0]


def vocab_logsumexp_backward(
    tp: Communicator, grad: Tensor, logits: Tensor, logsumexp: Tensor, classes: int
) -> Tensor:
    """Gradient of :func:`vocab_logsumexp`: the softmax, times ``grad``; no communication."""
    result = (logits - logsumexp.unsqueeze(-1)).exp_().mul_(grad.unsqueeze(-1))
    padding = padding_columns(tp, logits, classes)
    return result if padding is None else result.masked_fill_(padding, 0)


# What graphs need to know about them.


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, weight, ctx.ignore_index, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, weight, output[1])


def _backward_of_losses(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    logits, target, *others = ctx.saved_tensors
    # Here and not in the kernel: an ignored target may not be an index at all (-100).
    ignored = target == ctx.ignore_index
    grad, target = torch.where(ignored, 0, grad), torch.where(ignored, 0, target)
    result = _sp.vocab_smoothed_nll_backward(grad, logits, target, *others, *ctx.rest)
    return result, *[None] * 6


def _type_losses(args: Arguments, world_size: int) -> Sequence[Typing]:
    # I although the target is R: every rank has the same gradient of the loss, and backward does
    # not sum it.
    return [((S(1), R, R), (I, I))]


def _type_losses_backward(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((R, S(1), R, R, R), (S(1),))]


def _fake_rows(logits: Tensor, classes: int, world_size: int) -> Tensor:
    return logits.new_empty(logits.shape[:-1])


def _save_logits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *ctx.rest = inputs
    ctx.save_for_backward(logits, output)


def _backward_of_logsumexp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _sp.vocab_logsumexp_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None


def _type_logsumexp(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((S(args["logits"].meta["val"].dim() - 1),), (I,))]


def _type_logsumexp_backward(args: Arguments, world_size: int) -> Sequence[Typing]:
    logits = S(args["logits"].meta["val"].dim() - 1)
    return [((R, logits, R), (logits,))]


def _collectives_of_losses(args: Arguments, result: Any) -> Sequence[Collective]:
    rows = result[0].numel() * result[0].element_size()
    # The maximum of each row; then its sum of exponentials, label's logit and weighted logits.
    return [Collective("all_reduce", 2, rows + 3 * rows)]


def _collectives_of_logsumexp(args: Arguments, result: Any) -> Sequence[Collective]:
    return [Collective("all_reduce", 2, 2 * result.numel() * result.element_size())]


VOCAB_SMOOTHED_NLL = register(
    Operator(
        name="vocab_smoothed_nll",
        schema="(Tensor logits, Tensor target, Tensor weight, SymInt ignore_index, "
        "SymInt classes, float smoothing, SymInt world_size) -> (Tensor, Tensor)",
        kernel=vocab_smoothed_nll,
        fake=fake_losses,
        typings=_type_losses,
        gradient=Gradient(_save_rows, _backward_of_losses),
        result_names=("nll", "logsumexp"),
        dims="nv,n,w->n,n",
        collectives=_collectives_of_losses,
        scratch_bytes=scratch_of_losses,
    )
)
VOCAB_SMOOTHED_NLL_BACKWARD = register(
    Operator(
        name="vocab_smoothed_nll_backward",
        schema="(Tensor grad, Tensor logits, Tensor target, Tensor weight, Tensor logsumexp, "
        "SymInt classes, float smoothing, SymInt world_size) -> Tensor",
        kernel=vocab_smoothed_nll_backward,
        fake=fake_logits,
        typings=_type_losses_backward,
        dims="n,nv,n,w,n->nv",
    )
)
VOCAB_LOGSUMEXP = register(
    Operator(
        name="vocab_logsumexp",
        schema="(Tensor logits, SymInt classes, SymInt world_size) -> Tensor",
        kernel=vocab_logsumexp,
        fake=_fake_rows,
        typings=_type_logsumexp,
        gradient=Gradient(_save_logits, _backward_of_logsumexp),
        dims="...v->...",
        collectives=_collectives_of_logsumexp,
        scratch_bytes=scratch_of_losses,
    )
)
VOCAB_LOGSUMEXP_BACKWARD = register(
    Operator(
        name="vocab_logsumexp_backward",
        schema="(Tensor grad, Tensor logits, Tensor logsumexp, SymInt classes, "
        "SymInt world_size) -> Tensor",
        kernel=vocab_logsumexp_backward,
        fake=fake_logits,
        typings=_type_logsumexp_backward,
        dims="...,...v,...->...v",
    )
)
