"""Sums, means and losses of the rows that a mask chooses, with the numbers of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers.normalized import OfWeights, body, captured_from, outputs
from tests.helpers.torch_versions import COUNTS_CLASSES_FIRST

_X = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_P = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
_Function = Callable[[Tensor, Tensor], Tensor]


def _classes(x: Tensor) -> Tensor:
    return x.detach()[..., 0].gt(0).long() + x.detach()[..., 1].gt(0).long()


def _legal(x: Tensor, m: Tensor) -> Tensor:
    return (x.detach() > x.detach().amin(-1, keepdim=True)) & m[..., None]


REDUCTIONS: dict[str, _Function] = {
    "sum": lambda x, m: x[m].sum(),
    "sum over rows": lambda x, m: x[m].square().sum(0),
    "sum that keeps its dims": lambda x, m: x[m].sum((0, -1), keepdim=True),
    "count": lambda x, m: (x[m] > 0).sum() + x.sum(),
    "mean": lambda x, m: x[m].square().mean(),
    "mean over rows": lambda x, m: x[m].mean(0),
    "mean over the last of two dims": lambda x, m: x[:, m[0]].mean(1),
    "mean over two dims": lambda x, m: x[:, m[0]].mean((0, 1)),
    "mean of each row": lambda x, m: (x[m] * x[m].mean(-1, keepdim=True)).sum(),
    "mean in half precision": lambda x, m: (3e4 * x.half().abs().clamp(0.5, 1))[m].mean().double(),
    "mean by places": lambda x, m: x[0][torch.where(m.T)[0]].mean(),
    "of no row": lambda x, m: torch.stack([x[m & ~m].sum(), x[m & ~m].mean()]),
    "squares": lambda x, m: F.mse_loss(x[m], x[m].detach().tanh()),
    "sum of squares": lambda x, m: F.mse_loss(x[m], x[m].tanh(), reduction="sum"),
    "squares one by one": lambda x, m: F.mse_loss(x[m], x[m].tanh(), reduction="none").mean(),
    "distances": lambda x, m: F.l1_loss(x[m], x[m].detach() + 1),
    "Huber": lambda x, m: F.huber_loss(x[m], x[m].tanh(), delta=0.3),
    "smooth distances": lambda x, m: F.smooth_l1_loss(x[m], x[m].tanh(), beta=0.3),
    "binary cross entropy": lambda x, m: F.binary_cross_entropy_with_logits(
        x[m], x[m].detach().sigmoid(), pos_weight=x.detach()[0, 0].exp()
    ),
    "cross entropy": lambda x, m: F.cross_entropy(x[m], _classes(x)[m]),
    "cross entropy with weights, of some classes": lambda x, m: F.cross_entropy(
        x[m], _classes(x)[m], x.detach()[0, 0].exp(), ignore_index=1, label_smoothing=0.1
    ),
    "cross entropy one by one": lambda x, m: (
        F.cross_entropy(x[m], _classes(x)[m], reduction="none") * x[m].square().sum(-1)
    ).mean(),
    "cross entropy by places": lambda x, m: F.cross_entropy(
        x.flatten(0, 1)[torch.where(m.flatten())[0]],
        _classes(x).flatten()[torch.where(m.flatten())[0]],
        reduction="sum",
    ),
    "cross entropy of no row": lambda x, m: F.cross_entropy(x[m & ~m], _classes(x)[m & ~m]),
    "likelihood of each row's class": lambda x, m: (
        -x[m].log_softmax(-1).gather(-1, _classes(x)[m][:, None]).mean()
    ),
    "score of a place": lambda x, m: (
        x[m].gather(1, torch.where(m)[1].clamp(max=2)[:, None].expand(-1, 2)).square().sum()
    ),
    "selected numbers": lambda x, m: x.square().masked_select(m[..., None]).mean(),
    "selected of one row": lambda x, m: x[0, 0].masked_select(m[..., None]).sum(),
    "cross entropy of probabilities": lambda x, m: F.binary_cross_entropy(
        x[m].sigmoid(), x[m].detach().cos().square()
    ),
    "cross entropy by the first of two places": lambda x, m: F.cross_entropy(
        x[0][torch.where(m.T)[0].clamp(max=4)], _classes(x)[0][torch.where(m.T)[0].clamp(max=4)]
    ),
    "choices, none of which is legal beside the rows": lambda x, m: (
        torch.where(_legal(x, m)[m], x[m], -torch.inf).softmax(-1) @ x[0, :3]
    ).sum(),
    "probabilities out of their range beside the rows": lambda x, m: F.binary_cross_entropy(
        x[..., 0][m].sigmoid(), (torch.where(m, 3, 0).to(x.dtype)[m] - 1) / 4
    ),
    "likelihood": lambda x, m: F.nll_loss(x[m].log_softmax(-1), _classes(x)[m]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_numbers_and_gradients(name: str) -> None:
    def function(x: Tensor, p: Tensor) -> Tensor:
        return REDUCTIONS[name](x, p > 0)

    x, eager = (_X.clone().requires_grad_() for _ in range(2))
    true = function(eager, _P)
    # Captured with another mask: how many rows there are is in no number of the graph.
    actual = outputs(captured_from(function, x, -_P), x, _P)[0]
    torch.testing.assert_close(actual, true, rtol=1e-12, atol=1e-12, equal_nan=True)
    true.sum().backward()
    actual.sum().backward()
    torch.testing.assert_close(x.grad, eager.grad, rtol=1e-12, atol=1e-12)


def test_golden_mean() -> None:
    captured = captured_from(lambda x, p: x[p > 0].mean(), _X, _P)
    assert [line.strip() for line in body(captured)] == [
        "%2 = aten.gt.Scalar(%1, 0) : bool[2, 5]",
        "%3 = aten.reshape(%2, [2, 5, 1]) : bool[2, 5, 1]",
        "%4 = aten.where.ScalarOther(%3, %0, 0) : f64[2, 5, 3]",
        "%5 = aten.where.ScalarOther(%3, %4, 0) : f64[2, 5, 3]",
        "%6 = aten.mean.dim(%5, [2], True) : f64[2, 5, 1]",
        "%7 = aten.sum.dim_IntList(%6, [0, 1, 2]) : f64[]",
        "%8 = aten.sum(%2) : i64[]",
        "%9 = aten.div.Tensor(%7, %8) : f64[]",
        "output(%9)",
    ]


NEAR_MISSES: dict[str, tuple[_Function, str]] = {
    "the largest": (lambda x, m: x[m].amax(), "not computed row by row"),
    "a product": (lambda x, m: x[m].prod(), "not computed row by row"),
    "a sum of what lies in front": (lambda x, m: x[:, m[0]].sum(0).sum(), "row by row"),
    "classes of another mask": (
        lambda x, m: F.cross_entropy(x[m], _classes(x)[m & (x[..., 0] > -9)]),
        "values in a tensor" if COUNTS_CLASSES_FIRST else "those of another mask",
    ),
    "classes of no rows": (
        lambda x, m: F.cross_entropy(x[m], _classes(x)[0][: x[m].shape[0]]),
        "values in a tensor" if COUNTS_CLASSES_FIRST else "values that are not rows",
    ),
    "classes in dim 1 of three": (
        lambda x, m: F.cross_entropy(x[None][:, m].mT, _classes(x)[m][None]),
        "values in a tensor",
    ),
    "a place among rows": (
        lambda x, m: x[m].gather(0, _classes(x)[m][:, None]).sum(),
        "combined with each other",
    ),
    "their number": (lambda x, m: x[m].sum() / x[m].shape[0], "values in a tensor"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_with_their_reason(name: str) -> None:
    function, reason = NEAR_MISSES[name]
    with pytest.raises(CaptureError, match=reason):
        capture(OfWeights(lambda x, p: function(x, p > 0), _P), (_X,))
