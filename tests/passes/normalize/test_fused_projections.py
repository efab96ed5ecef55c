"""Slices and selections of one product become its split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compiler.ir.fx import calls
from tests.helpers.normalized import body, normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten
sp = torch.ops.sp_compiler


def _packed_attention_inputs(x: Tensor) -> tuple[Tensor, ...]:
    """The views of ``nn.MultiheadAttention`` on the product of its fused weight."""
    packed = x.unflatten(-1, (3, 4)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return packed[0], packed[1], packed[2]


@pytest.mark.parametrize("size", [(5, 2, 12), (5, 1, 12), (1, 1, 12)])
def test_packed_projection_is_split(size: tuple[int, ...]) -> None:
    x = randn(*size)
    captured = normalized(_packed_attention_inputs, x)
    part = f"f64[{size[0]}, {size[1]}, 4]"
    assert body(captured) == [
        f"%1 = aten.split_with_sizes(%0, [4, 4, 4], -1) : ({part}, {part}, {part})",
        f"%2 = getitem(%1, 0) : {part}",
        f"%3 = getitem(%1, 1) : {part}",
        f"%4 = getitem(%1, 2) : {part}",
        "output(%2, %3, %4)",
    ]
    assert all(map(torch.equal, outputs(captured, x), _packed_attention_inputs(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.unflatten(-1, (3, 4))[:, 1],
        lambda x: x.unflatten(-1, (3, 4)).transpose(0, 1)[:, :, 0],
        lambda x: x.unflatten(-1, (3, 4)).flatten(0, 1)[:, 0],
    ],
    ids=["another dim", "other order", "merged dims"],
)
def test_other_selections_stay(function: Callable[[Tensor], Tensor]) -> None:
    captured = normalized(function, randn(5, 2, 12))
    assert not list(calls(captured.module.graph, aten.split_with_sizes.default))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y[..., :8], y[..., 8:10], y[..., 10:]),
        lambda y: (y[..., -2:], y[..., :8], y[..., 8:-2]),
        lambda y: (y[..., 10:], y[..., :8], y[..., 8:10], y[:1] * 2),
    ],
    ids=["in order", "from the end", "with another use"],
)
def test_slices_of_a_product_are_its_split(function: Callable[[Tensor], Any]) -> None:
    def sliced(x: Tensor, w: Tensor) -> Any:
        return function(x @ w.T)

    x, w = randn(2, 5, 6, grad=True), randn(12, 6, grad=True)
    captured = normalized(sliced, x, w)
    (split,) = calls(captured.module.graph, aten.split_with_sizes.default)
    assert split.args[1:] == ([8, 2, 2], -1)
    assert all(map(torch.equal, outputs(captured, x, w), sliced(x, w)))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y[..., :8], y[..., 7:]),
        lambda y: (y[..., :8], y[..., 9:]),
        lambda y: (y[..., 1:8], y[..., 8:]),
        lambda y: (y[..., :8], y[..., 8:11]),
        lambda y: (y[..., :8], y[..., :8] * 2, y[..., 8:]),
        lambda y: (y[:, :2], y[:, 2:]),
        lambda y: ((y * 2)[..., :8], (y * 2)[..., 8:]),
    ],
    ids=["overlap", "hole", "no start", "no end", "twice", "another dim", "no product"],
)
def test_other_slices_stay(function: Callable[[Tensor], Any]) -> None:
    def sliced(x: Tensor, w: Tensor) -> Any:
        return function(x @ w.T)

    x, w = randn(2, 5, 6, grad=True), randn(12, 6, grad=True)
    captured = normalized(sliced, x, w)
    assert not list(calls(captured.module.graph, aten.split_with_sizes.default))
    assert all(map(torch.equal, outputs(captured, x, w), sliced(x, w)))
