"""Options of operators that normalization sets: stable sorts, dense gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.ir.fx import calls
from tests.helpers.normalized import body, normalized, outputs, randn


def test_equal_keys_keep_their_order() -> None:
    """Elsewhere it is up to the kernel, and backward may sort again with another one."""
    ids = torch.tensor([1, 0, 1, 0])
    captured = normalized(lambda x: (x.sort(descending=True)[1], x.argsort()), ids)
    assert body(captured) == [
        "%1 = aten.sort.stable(%0, stable=True, dim=-1, descending=True) : (i64[4], i64[4])",
        "%2 = getitem(%1, 1) : i64[4]",
        "%3 = aten.argsort.stable(%0, stable=True, dim=-1, descending=False) : i64[4]",
        "output(%2, %3)",
    ]
    falling, rising = outputs(captured, ids)
    assert (falling.tolist(), rising.tolist()) == ([0, 2, 1, 3], [1, 3, 0, 2])


@pytest.mark.parametrize("stable", [False, None, True])
def test_sorts_that_need_not_be_stable_are(stable: bool | None) -> None:
    def sorts(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sort(x, stable=stable, dim=0)[1], torch.argsort(x, stable=bool(stable))

    captured = normalized(sorts, torch.tensor([1, 0, 1, 0]))
    aten = torch.ops.aten
    found = list(calls(captured.module.graph, aten.sort.stable, aten.argsort.stable))
    assert [node.kwargs["stable"] for node in found] == [True, True]


@pytest.mark.parametrize(
    "function",
    [
        lambda w, ids: F.embedding(ids, w, sparse=True),
        lambda w, ids: F.embedding_bag(ids, w, sparse=True),
        lambda w, ids: torch.gather(w, 1, ids, sparse_grad=True),
    ],
)
def test_gradients_are_dense(function: Callable[..., Tensor]) -> None:
    """A distributed parameter has no sparse ones."""
    w, ids = randn(3, 3, grad=True), torch.tensor([[1, 2], [1, 0]])
    (out,) = outputs(normalized(function, w, ids), w, ids)
    (actual,) = torch.autograd.grad(out.square().sum(), w)
    (expected,) = torch.autograd.grad(function(w, ids).square().sum(), w)
    assert actual.layout == torch.strided
    torch.testing.assert_close(actual, expected.to_dense())
