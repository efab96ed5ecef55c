"""A number that is written where a mask of activations is true: ``y[torch.where(mask)] = 0``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers.normalized import OfWeights, body

_X = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_P = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

_Function = Callable[[Tensor, Tensor], Tensor]


def _rows(x: Tensor, p: Tensor) -> Tensor:
    y = x.clone()
    y[torch.where(p > 0)] = x.new_full((), 2.0)
    return y * p[..., None]


def _columns(x: Tensor, p: Tensor) -> Tensor:
    token, slot = (p > 0).nonzero().unbind(1)
    return x.index_put((token, slot), p.sum()) * p[..., None]


@pytest.mark.parametrize("function", [_rows, _columns])
def test_it_is_chosen_by_the_mask(function: _Function) -> None:
    captured = capture(OfWeights(function, _P), (_X,))
    lines = "\n".join(body(captured))
    assert "aten.where.self(" in lines
    assert "index_put" not in lines
    for p in (_P, -_P, _P.abs(), -_P.abs()):
        x, weights = _X.clone().requires_grad_(), p.clone().requires_grad_()
        expected = function(x, weights)
        (actual,) = captured.module(weights, x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        true = torch.autograd.grad(expected.square().sum(), (x, weights))
        found = torch.autograd.grad(actual.square().sum(), (x, weights))
        torch.testing.assert_close(found, true, rtol=1e-14, atol=1e-14)


def _swapped(x: Tensor, p: Tensor) -> Tensor:
    token, slot = torch.where(p > 0)
    return x.new_zeros(4, 3).index_put((slot, token), p.sum())


@pytest.mark.parametrize(
    "function",
    [
        _swapped,
        lambda x, p: x.index_put((torch.where(p > 0)[0],), p.sum()),
        lambda x, p: x.index_put((torch.where(p > 0)[0] + 1,), p.sum()),
        lambda x, p: x.new_zeros(4, 4).index_put(torch.where(p > 0), p.sum()),
    ],
)
def test_other_places_are_refused(function: _Function) -> None:
    with pytest.raises(CaptureError, match="a number is written at other places"):
        capture(OfWeights(function, _P), (_X,))
