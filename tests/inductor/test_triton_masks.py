"""Masks in the Triton code that Inductor emits for a GPU, interpreted: equal to the bit to those of
the operators and, by ``tests/ops/test_gpu_dropout.py``, to those of our own kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.inductor_kernels import emit
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.dropout import dropout, dropout_mask
from tests.helpers.inductor import fused
from tests.helpers.interpreted_triton import Run, needs_triton, run_emitted

pytestmark = needs_triton

# Small, negative, and one whose products overflow 64 bits.
SEEDS = (0, -3, 0x5DEECE66D1234567)
# site, dim, ranks, rows before, padding, first query, queries: each branch of the places.
PLACES = (
    (0, 0, 1),
    (1, 0, 2),
    (2, 1, 2, 0, 1),
    (3, -1, 2),
    (1 << 20, 0, 1, (1 << 33) + 5),
    (4, 1, 2, 0, 0, 5, 10),
)
P = 0.3


def _masks(tp: Communicator, x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    return tuple(dropout_mask(tp, x, seed, P, *place) for place in PLACES)


def _chain(tp: Communicator, x: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    return (dropout(tp, x * bias, seed, P, 2, 1, 2) + x,)


@pytest.mark.slow
def test_masks_of_all_places_seeds_and_ranks(interpreted: Run) -> None:
    x = torch.zeros(3, 4, 5, 6)
    traced = fused(_masks, (x, torch.tensor(0)))._traced
    assert traced is not None
    text = emit(traced).text
    for seed in map(torch.tensor, SEEDS):
        for rank in (0, 1):
            actual = interpreted(run_emitted, text, [torch.tensor(rank), x, seed])
            expected = _masks(Communicator(None, rank, 2), x, seed)
            for one, other in zip(actual, expected, strict=True):
                assert torch.equal(one, other)
                assert 0 < int(other.sum()) < other.numel()


@pytest.mark.slow
def test_a_chain_of_operators_around_dropout_is_one_kernel(interpreted: Run) -> None:
    x, bias, seed = torch.randn(3, 4, 64), torch.randn(64), torch.tensor(SEEDS[-1])
    traced = fused(_chain, (x, bias, seed))._traced
    assert traced is not None
    text = emit(traced).text
    assert text.count("'*fp32'") == 3  # two operands and a result
    (actual,) = interpreted(run_emitted, text, [torch.tensor(1), x, bias, seed])
    (expected,) = _chain(Communicator(None, 1, 2), x, bias, seed)
    assert torch.equal(actual, expected)
