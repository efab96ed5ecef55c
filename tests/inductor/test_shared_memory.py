"""Results of Inductor that share memory, and what it writes in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from sp_compiler.ops.communicator import Communicator
from tests.helpers.inductor import fused, needs_compiler, own_cache

pytestmark = needs_compiler
ALONE = Communicator(None, 0, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with own_cache(tmp_path):
        yield tmp_path


def test_results_in_one_memory_share_a_version() -> None:
    """A kernel returns parts of its memory as tensors that know nothing of each other."""
    x = torch.ones(2, 3)
    compiled = fused(lambda tp, x: (x.t(), x + 1, (x + 1).flatten()), [x])
    part = torch.ops.inductor._reinterpret_tensor
    made: list[Tensor] = []

    def kernels(values: list[Tensor]) -> Sequence[Tensor]:
        made[:] = [values.pop() + 1]
        return part(x, (3, 2), (1, 3), 0), made[0], part(made[0], (6,), (1,), 0)

    with mock.patch("sp_compiler.inductor.fused.compile_graph", return_value=kernels):
        for _ in range(2):  # what the first call tells is used in the second
            first, second, third = compiled(ALONE, x)
            assert first._base is x
            assert second is made[0]
            second.zero_()
            assert second._version == third._version == 1
            assert not third.any()


@pytest.mark.slow
def test_a_sum_with_what_is_written_in_place() -> None:
    """Fused with loops over other sizes, it must not run ahead of what writes."""

    def function(
        tp: Communicator, x: Tensor, y: Tensor, z: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        outer = x.unsqueeze(1) * y
        return outer, outer + (z * 2).scatter(1, ids, 0)

    ids = torch.tensor([[0, 2]] * 4)
    arguments = [torch.randn(4), torch.randn(6), torch.randn(4, 6), ids]
    results = fused(function, arguments)(ALONE, *arguments)
    for got, expected in zip(results, function(ALONE, *arguments), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_rows_that_are_added_to_their_own_tensor() -> None:
    """Inductor adds in place, and must not read what it has changed."""

    def function(tp: Communicator, x: Tensor, rows: Tensor) -> Tensor:
        y = x * 2
        return y.index_put((rows,), y[:2], accumulate=True)

    x, rows = torch.arange(24.0).reshape(6, 4), torch.tensor([1, 2])
    assert torch.equal(fused(function, [x, rows])(ALONE, x, rows), function(ALONE, x, rows))
