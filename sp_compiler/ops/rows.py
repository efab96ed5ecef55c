"""Rows of tokens whose number may not be divisible by the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import P, R
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Arguments, Gradient, Operator, Typing, register

_sp = torch.ops.sp_compiler


def pad_rows(tp: Communicator, x: Tensor) -> Tensor:
    """Append copies of the last row of ``x``, so that dim 0 is divisible by the number of ranks.

    Copies, unlike zeros, cannot lead to NaN (a norm divides by the row's size), and no gradient
    flows from them. Returns ``x`` itself if dim 0 is already divisible.
    """
    missing = -x.shape[0] % tp.world_size
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


def pad_rows_with_zeros(tp: Communicator, x: Tensor) -> Tensor:
    """Like :func:`pad_rows`, but with zeros: the gradient of :func:`cut_rows`."""
    missing = -x.shape[0] % tp.world_size
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def cut_rows(tp: Communicator, x: Tensor, rows: int) -> Tensor:
    """Return a view of the first ``rows`` rows of ``x``, which :func:`pad_rows` padded."""
    return x.narrow(0, 0, rows)


def _fake_padded(x: Tensor, world_size: int) -> Tensor:
    return x.new_empty(((x.shape[0] + world_size - 1) // world_size * world_size, *x.shape[1:]))


def _fake_cut(x: Tensor, rows: int, world_size: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _typings(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Global values; the padding of a partial sum adds up to the padding of the sum."""
    return [((R,), (R,)), ((P,), (P,))]


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.world_size = inputs
    ctx.rows = x.shape[0]


def _backward_of_pad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # No gradient flows from the copies: the results of padding rows are cut off in the end.
    return _sp.cut_rows(grad, ctx.rows, ctx.world_size), None


def _save_world_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.world_size = inputs


def _backward_of_cut(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _sp.pad_rows_with_zeros(grad, ctx.world_size), None, None


PAD_ROWS = register(
    Operator(
        name="pad_rows",
        schema="(Tensor x, SymInt world_size) -> Tensor",
        kernel=pad_rows,
        fake=_fake_padded,
        typings=_typings,
        gradient=Gradient(_save_rows, _backward_of_pad),
    )
)
PAD_ROWS_WITH_ZEROS = register(
    Operator(
        name="pad_rows_with_zeros",
        schema="(Tensor x, SymInt world_size) -> Tensor",
        kernel=pad_rows_with_zeros,
        fake=_fake_padded,
        typings=_typings,
    )
)
CUT_ROWS = register(
    Operator(
        name="cut_rows",
        schema="(Tensor x, SymInt rows, SymInt world_size) -> Tensor",
        kernel=cut_rows,
        fake=_fake_cut,
        typings=_typings,
        gradient=Gradient(_save_world_size, _backward_of_cut),
        view="part",
    )
)
