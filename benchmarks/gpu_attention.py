"""Attention as one operator, as decomposed operators, and with PyTorch's own kernels.

With the sizes of one of 8 ranks in a layer of the paper's 22B model, in bfloat16. Recorded and
replayed on an accelerator, so that times do not include launches. Run by
``python -m benchmarks.gpu --only attention``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import Stopwatch
from sp_compiler.ops import attention as operators
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu import attention as kernels

BATCH, HEADS, LENGTH, DROPOUT = 4, 8, 2048, 0.1
WIDTHS = 64, 96, 128
ONE = "one operator"
PYTORCHS_BLOCKS = f"{ONE}, blocks of PyTorch's choice"
OPERATORS = "its operators"
FLASH = "PyTorch's FlashAttention"
Timed = tuple[Callable[[], Any], Callable[[], Any]]
_TP = Communicator(None, 1, 8)
_aten = torch.ops.aten
# What is compiled with the one choice is not what is compiled with the other.
_PYTORCHS_CHOICE: Any = {"_options": lambda given: kernels._OPTIONS, "_COMPILED": {}}


@dataclass(frozen=True)
class AttentionRow:
    """One contender: milliseconds of a causal forward and of its backward, for heads of a width."""

    width: int
    dropout: float
    contender: str
    forward_ms: float
    backward_ms: float


def attention(device: str, *, small: bool, rounds: int) -> Iterator[AttentionRow]:
    """All contenders, with dropout and without."""
    length = 128 if small else LENGTH
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril_()
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        shape = (4, BATCH, length, HEADS, width)
        # (b, a, s, d) views of (b, s, a, d), as layers make them
        factors = torch.randn(shape, generator=generator).to(device, dtype).transpose(2, 3).unbind()
        for dropout in (0.0, DROPOUT):
            for name, pair in _contenders(factors, mask, dropout):
                forward_ms, backward_ms = (_milliseconds(each, device, rounds) for each in pair)
                yield AttentionRow(width, dropout, name, forward_ms, backward_ms)


def _contenders(
    factors: Sequence[Tensor], mask: Tensor, dropout: float
) -> Iterator[tuple[str, Timed]]:
    yield ONE, _ours(factors, mask, dropout)
    if mask.is_cuda:
        if dropout:
            with mock.patch.multiple(kernels, **_PYTORCHS_CHOICE):
                yield PYTORCHS_BLOCKS, _ours(factors, mask, dropout)
        yield FLASH, _flash(factors, dropout)
        with mock.patch.object(operators, "_kernels", return_value=None):
            yield OPERATORS, _ours(factors, mask, dropout)


def _ours(factors: Sequence[Tensor], mask: Tensor, dropout: float) -> Timed:
    query, key, value, grad = factors
    seed = torch.tensor(1, device=mask.device) if dropout else None
    place: Any = (mask, seed, query.shape[-1] ** -0.5, dropout, 0, 1, _TP.world_size)
    given: Any = (query, key, value, *place)
    made: Any = operators.dropout_attention(_TP, *given)
    of_backward: Any = (grad, query, key, value, *made, *place)
    return (
        lambda: operators.dropout_attention(_TP, *given),
        lambda: operators.dropout_attention_backward(_TP, *of_backward),
    )


def _flash(factors: Sequence[Tensor], dropout: float) -> Timed:
    *given, grad = factors
    # As operators: autograd would run them on streams that are not recorded.
    context, logsumexp, *rest, state, unused, _ = _aten._scaled_dot_product_flash_attention(
        *given, dropout, True
    )
    made = context, logsumexp, *rest, dropout, True, state, unused
    return (
        lambda: _aten._scaled_dot_product_flash_attention(*given, dropout, True),
        lambda: _aten._scaled_dot_product_flash_attention_backward(grad, *given, *made),
    )


def _milliseconds(function: Callable[[], Any], device: str, rounds: int) -> float:
    if device != "cpu":
        from triton.testing import do_bench_cudagraph

        return float(do_bench_cudagraph(function, rep=20, return_mode="median"))
    times = []
    for _ in range(rounds):
        with Stopwatch() as watch:
            function()
        times.append(watch.ms)
    return statistics.median(times)
