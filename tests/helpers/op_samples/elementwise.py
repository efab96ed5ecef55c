"""Calls of elementwise operators that a schema does not describe."""

from __future__ import annotations

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
    "sp_compiler_function::apply": _autograd_function,
    "sp_compiler::dropout": _dropout,
    "sp_compiler::dropout_mask": _dropout,
    "sp_compiler::uniform": _uniform,
}
