"""Calls of elementwise operators that a schema does not describe."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.trace.autograd_functions import FunctionCall, numbered
from tests.helpers.op_samples.draw import Args, Draw, Sample

aten = torch.ops.aten


def _masked_fill(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.mask(*draw.narrower(shape)), draw.numbers()]


def _dropout(draw: Draw) -> Args:
    return [draw.numbers(*draw.shape()), torch.tensor(7), 0.3, 5, 0, 1]


def _uniform(draw: Draw) -> Args:
    return [torch.tensor(7), list(draw.shape()), torch.float64, 5, 0, 1]


def _checked_ids(draw: Draw) -> Args:
    return [draw.ids(5, *draw.shape()), 5, draw.one_of(None, 2), "a table of {} rows", 1]


def _complex_numbers(draw: Draw) -> Args:
    shape = draw.shape()
    return [torch.complex(draw.numbers(*shape), draw.numbers(*shape))]


def _prelu(draw: Draw) -> Args:
    """With one slope, or one for each channel."""
    x = draw.numbers(*draw.shape(2, 3))
    return [x, draw.numbers(draw.one_of(1, x.shape[1]))]


def _log_sigmoid_backward(draw: Draw) -> Args:
    x = draw.numbers(*draw.shape())
    return [draw.numbers(*x.shape), x, aten.log_sigmoid_forward(x)[1]]


def _loss(draw: Draw, name: str, backward: bool = False) -> Args:
    """Of probabilities; not reduced most of the time."""
    shape = draw.shape()
    x, y = (draw.numbers(*shape).sigmoid() for _ in range(2))
    args = [x, y, *([None] if name == "binary_cross_entropy" else [])]
    reduction = draw.one_of(0, 0, 1)
    grad = [draw.numbers(*(() if reduction else shape))] if backward else []
    extra = [0.3] if backward and name in ("smooth_l1_loss", "huber_loss") else []
    return [*grad, *args, reduction, *extra]


def _loss_samples() -> dict[str, Sample]:
    names = ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
    forward = {f"aten::{name}": functools.partial(_loss, name=name) for name in names}
    backward = {
        f"aten::{name}_backward": functools.partial(_loss, name=name, backward=True)
        for name in names
    }
    return {**forward, **backward}


class _Turned(torch.autograd.Function):
    """Pointwise in both directions; the backward is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y.cos() * factor, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return first * y - second, second * x, None


_SPEC = pytree.tree_structure(((None, None, 3.0), {}))
_TURNED_BY_3 = FunctionCall(_Turned, _SPEC, [None, None, 3.0], [0, 1])


def _autograd_function(draw: Draw) -> Args:
    shape = draw.shape()
    return [[draw.numbers(*shape), draw.numbers(*shape)], numbered(_TURNED_BY_3)[0]]


SAMPLES: dict[str, Sample] = {
    "aten.masked_fill.Tensor": _masked_fill,
    "aten::_conj": _complex_numbers,
    "aten::conj_physical": _complex_numbers,
    **_loss_samples(),
    "aten::prelu": _prelu,
    "aten::log_sigmoid_backward": _log_sigmoid_backward,
    "sp_compiler_function::apply": _autograd_function,
    "sp_compiler::checked_ids": _checked_ids,
    "sp_compiler::dropout": _dropout,
    "sp_compiler::dropout_mask": _dropout,
    "sp_compiler::uniform": _uniform,
}
