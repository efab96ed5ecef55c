"""Kernels and bytes that are counted in the code that Inductor emits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.inductor_kernels import Counts, count, emit
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.dropout import dropout
from tests.helpers.inductor import fused

ROWS, COLUMNS = 1024, 2048
SIZE = ROWS * COLUMNS * 4
X = torch.empty(ROWS, COLUMNS)


def _count(function: object, *arguments: Tensor) -> Counts:
    traced = fused(function, arguments)._traced  # type: ignore[arg-type]
    assert traced is not None
    return count(emit(traced))


def test_dropout_is_in_the_pass_of_its_neighbours() -> None:
    """The pass before the product reads two tensors and writes one; the one behind it likewise."""

    def function(
        tp: Communicator, x: Tensor, y: Tensor, weight: Tensor, seed: Tensor
    ) -> tuple[Tensor, ...]:
        z = torch.mm(F.gelu(x + y), weight)
        return (dropout(tp, z, seed, 0.1, 1, 0, 2) + x,)

    weight = torch.empty(COLUMNS, COLUMNS)
    counts = _count(function, X, X.clone(), weight, torch.tensor(0))
    rest = counts.bytes - 8 * SIZE - 4 * COLUMNS**2
    assert (counts.products, counts.passes - counts.small) == (1, 2)
    # The hash of each row, written once and read once.
    assert 0 < rest <= 3 * 8 * ROWS
    assert counts.once <= counts.bytes
    assert counts.again == 0


def test_what_is_read_twice_is_counted_twice() -> None:
    """Sums over rows and over columns take a pass each, which one pass could read for both."""
    counts = _count(lambda tp, x: (x.sum(0), (x * 2).cumsum(1)), X)
    assert counts.bytes >= counts.once + SIZE
    assert counts.products == 0


def test_a_second_loop_over_a_row_is_told_apart() -> None:
    counts = _count(lambda tp, x: torch.softmax(x, -1), X)
    assert (counts.passes, counts.bytes, counts.once, counts.again) == (1, 2 * SIZE, 2 * SIZE, SIZE)


def test_of_a_chunk_only_that_part_counts() -> None:
    """A product that reads half of the rows, without copying them."""
    counts = _count(lambda tp, x, y: torch.mm(x[: ROWS // 2], y), X, X.t().contiguous())
    assert counts.products == 1
    assert counts.bytes == SIZE // 2 + SIZE + ROWS // 2 * ROWS * 4
