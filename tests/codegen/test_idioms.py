"""Chains of operators that print as one call, and their near-misses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.compiled_region import compile_region
from tests.helpers.regions import TP1, random_inputs, reference, region_of


class _Batched(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        product = torch.bmm(x.view(6, 4, 5), y.view(6, 5, 7))
        return product.view(2, 3, 4, 7).sin()


@pytest.mark.parametrize(
    ("shape", "is_matmul"),
    [((2, 3, 4, 5), True), ((2, 3, 20), False), ((3, 2, 4, 5), False), ((2, 3, 5, 4), False)],
)
def test_a_product_of_batches_needs_factors_of_these_batches(
    shape: tuple[int, ...], is_matmul: bool
) -> None:
    y = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    region = region_of(_Batched(), x, y, requires_grad=[False, False])
    compiled = compile_region(region, recompute="none")
    inputs = random_inputs(region)
    (result,), _ = compiled.code.forward(TP1, *inputs)
    assert torch.equal(result, reference(region, inputs)[0])
    assert ("torch.matmul(" in compiled.source) is is_matmul
