"""Losses over all alignments of a sequence with a shorter one (connectionist temporal
classification, Graves et al. 2006).

PyTorch's operator also returns a table for its backward, whose size depends on the values of the
lengths, so that no graph can contain it. This one returns only the losses, and its backward
computes the table again: T x N x (2 S + 1) additions, negligible next to the model before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import I
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Arguments, Gradient, Operator, Typing, register

_aten, _sp = torch.ops.aten, torch.ops.sp_compiler
LEFT_OUT = torch.iinfo(torch.int32).min
"""Replaces a label that a mask has left out."""


def ctc_loss(
    tp: Communicator,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
    world_size: int,
) -> Tensor:
    """Loss (n,) of each sequence.

    ``log_probs`` (t, n, c), and the lengths (n,), are replicated, like ``targets``: (n, s), padded
    after each length, or all concatenated in one dim, where those that are LEFT_OUT do not count.
    Every rank computes all of it; ``world_size``, 1 in a captured model, has no effect.
    """
    given = log_probs, _without_rest(targets), input_lengths, target_lengths
    losses, _ = _table(*given, blank, zero_infinity)
    return torch.where(losses.isinf(), 0, losses) if zero_infinity else losses


def ctc_loss_backward(  # noqa: PLR0913 - those of the operator
    tp: Communicator,
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
    world_size: int,
) -> Tensor:
    """Gradient of :func:`ctc_loss` for ``log_probs``."""
    given = log_probs, _without_rest(targets), input_lengths, target_lengths
    table = _table(*given, blank, zero_infinity)
    result = _aten._ctc_loss_backward.Tensor(grad, *given, *table, blank, zero_infinity)
    # The kernel's result has the strides of the scores, which models transpose.
    return result.contiguous()


def _table(*args: Any) -> tuple[Tensor, Tensor]:
    # Not ``torch.ctc_loss``, whose cuDNN kernel has no table.
    return _aten._ctc_loss.Tensor(*args)


def _without_rest(targets: Tensor) -> Tensor:
    # The number of remaining labels must match the lengths: else the kernel raises an error.
    return targets[targets != LEFT_OUT] if targets.dim() == 1 else targets


def _fake_losses(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:2])


def _fake_gradient(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity, ctx.world_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rest = ctx.blank, ctx.zero_infinity, ctx.world_size
    return _sp.ctc_loss_backward(grad, *ctx.saved_tensors, *rest), *[None] * 6


def _typings(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((I,) * (5 if "grad" in args else 4), (I,))]


def _table_bytes(args: Arguments, result: Any) -> int:
    log_probs, targets = (args[name].meta["val"] for name in ("log_probs", "targets"))
    # For targets in one dim the longest sequence is unknown; if a mask has selected them from
    # padded ones, it is at most as long as these.
    sequences = log_probs.shape[1]
    longest = targets.shape[-1] if targets.dim() == 2 else -(-targets.shape[0] // sequences)
    states = log_probs.shape[0] * sequences * (2 * longest + 1)
    num_bytes: int = (2 if "grad" in args else 1) * states * log_probs.element_size()
    return num_bytes


_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity, SymInt world_size"
)
CTC_LOSS = register(
    Operator(
        name="ctc_loss",
        schema=f"({_ARGUMENTS}) -> Tensor",
        kernel=ctc_loss,
        fake=_fake_losses,
        typings=_typings,
        gradient=Gradient(_save, _backward),
        checks_numbers=True,
        scratch_bytes=_table_bytes,
    )
)
CTC_LOSS_BACKWARD = register(
    Operator(
        name="ctc_loss_backward",
        schema=f"(Tensor grad, {_ARGUMENTS}) -> Tensor",
        kernel=ctc_loss_backward,
        fake=_fake_gradient,
        typings=_typings,
        checks_numbers=True,
        scratch_bytes=_table_bytes,
    )
)
