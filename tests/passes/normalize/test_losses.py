"""Losses over classes become operators that can be sharded by class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.planning.fallbacks import fallbacks
from tests.helpers import parity
from tests.helpers.normalized import body, normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_IDS = torch.tensor([1, 0, 3])
_SEVERAL = torch.tensor([[3, 5, -1, *range(5)], [2, 2, *[-1] * 6], [*range(7), 0]])
_SOFT = randn(3, 8).softmax(-1)
_WEIGHT = randn(8).abs()


def test_soft_targets() -> None:
    captured = normalized(
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), randn(3, 8, grad=True), _SOFT
    )
    assert body(captured) == [
        "%2 = aten.mul.Tensor(%1, 0.9) : f64[3, 8]",
        "%3 = aten.add.Tensor(%2, 0.0125) : f64[3, 8]",
        "%4 = aten.log_softmax.int(%0, -1) : f64[3, 8]",
        "%5 = aten.mul.Tensor(%4, %3) : f64[3, 8]",
        "%6 = aten.sum.dim_IntList(%5, [-1]) : f64[3]",
        "%7 = aten.neg(%6) : f64[3]",
        "%8 = aten.sum(%7) : f64[]",
        "%9 = aten.div.Tensor(%8, 3) : f64[]",
        "output(%9)",
    ]


def test_likelihood_of_log_softmax_is_cross_entropy() -> None:
    captured = normalized(
        lambda x, y: F.nll_loss(x.log_softmax(-1).view(-1, 8), y), randn(1, 3, 8, grad=True), _IDS
    )
    assert body(captured) == [
        "%2 = aten.reshape(%0, [3, 8]) : f64[3, 8]",
        "%3 = aten.cross_entropy_loss(%2, %1, None, 1, -100) : f64[]",
        "output(%3)",
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.nll_loss(x.log_softmax(0), _IDS),
        lambda x: F.nll_loss(x, _IDS),
        lambda x: F.nll_loss(x.reshape(8, 3).log_softmax(-1).reshape(3, 8), _IDS),
    ],
)
def test_likelihood_of_anything_else_stays(function: Callable[[Tensor], Tensor]) -> None:
    assert any("nll_loss" in line for line in body(normalized(function, randn(3, 8, grad=True))))


def test_one_log_probability_per_row_is_cross_entropy() -> None:
    captured = normalized(
        lambda x, y: x.log_softmax(-1).gather(2, y[None, :, None]).squeeze(-1),
        *(randn(1, 3, 8, grad=True), _IDS),
    )
    assert body(captured) == [
        "%2 = aten.unsqueeze(%1, -2) : i64[1, 3]",
        "%3 = aten.unsqueeze(%2, -1) : i64[1, 3, 1]",
        "%4 = aten.reshape(%0, [3, 8]) : f64[3, 8]",
        "%5 = aten.reshape(%3, [3]) : i64[3]",
        "%6 = aten.cross_entropy_loss(%4, %5, None, 0, -2147483648) : f64[3]",
        "%7 = aten.neg(%6) : f64[3]",
        "%8 = aten.reshape(%7, [1, 3]) : f64[1, 3]",
        "output(%8)",
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.log_softmax(0).gather(-1, _IDS[:, None]),
        lambda x: x.log_softmax(-1).gather(0, _IDS[None]),
        lambda x: x.log_softmax(-1).gather(-1, _IDS.expand(3, 3)),
        lambda x: x.log_softmax(-1).gather(-1, _IDS[:2, None]),
        lambda x: (y := x.log_softmax(-1)).gather(-1, _IDS[:, None]) * y,
    ],
)
def test_what_is_picked_otherwise_stays(function: Callable[[Tensor], Tensor]) -> None:
    assert any("aten.gather" in line for line in body(normalized(function, randn(3, 8, grad=True))))


def _soft(reduction: str, weight: Tensor | None, smoothing: float) -> Callable[[Tensor], Tensor]:
    return lambda x: F.cross_entropy(
        x, _SOFT, weight, reduction=reduction, label_smoothing=smoothing
    )


def _divergence(reduction: str, log_target: bool) -> Callable[[Tensor], Tensor]:
    target = _SOFT.log() if log_target else _SOFT
    return lambda x: F.kl_div(x.log_softmax(-1), target, reduction=reduction, log_target=log_target)


def _several_labels(reduction: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.multilabel_margin_loss(x, _SEVERAL, reduction=reduction)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    f"soft, {reduction}, smoothed by {smoothing}": _soft(reduction, weight, smoothing)
    for reduction in ("none", "mean", "sum")
    for weight, smoothing in ((None, 0.0), (_WEIGHT, 0.2))
}
_FUNCTIONS |= {
    f"kl, {reduction}, {log_target}": _divergence(reduction, log_target)
    for reduction in ("none", "mean", "sum", "batchmean")
    for log_target in (False, True)
}
_FUNCTIONS |= {f"several labels, {r}": _several_labels(r) for r in ("none", "mean", "sum")}
_ELEMENT_LOSSES: dict[str, Callable[..., Tensor]] = {
    "squares": F.mse_loss,
    "distances": F.l1_loss,
    "smooth distances": lambda x, t, **given: F.smooth_l1_loss(x, t, beta=0.3, **given),
    "huber": lambda x, t, **given: F.huber_loss(x, t, delta=0.3, **given),
    "binary": lambda x, t, **given: F.binary_cross_entropy(x.sigmoid(), t, _WEIGHT, **given),
    "binary of logits": F.binary_cross_entropy_with_logits,
    "binary of logits, weighed": lambda x, t, **given: F.binary_cross_entropy_with_logits(
        x, t, _WEIGHT, pos_weight=2 * _WEIGHT, **given
    ),
}


def _of_elements(name: str, reduction: str) -> Callable[[Tensor], Tensor]:
    return lambda x: _ELEMENT_LOSSES[name](x, _SOFT, reduction=reduction)


_FUNCTIONS |= {
    f"{name}, {reduction}": _of_elements(name, reduction)
    for name in _ELEMENT_LOSSES
    for reduction in ("none", "mean", "sum")
}
_FUNCTIONS |= {
    "soft, one sample": lambda x: F.cross_entropy(x[0], _SOFT[0]),
    "soft, classes first": lambda x: F.cross_entropy(x.T[None], _SOFT.T[None]),
    "kl, certain": lambda x: F.kl_div(x.log_softmax(-1), torch.eye(8).double()[_IDS]),
    "likelihood, weighed": lambda x: F.nll_loss(x.log_softmax(1), _IDS, _WEIGHT, ignore_index=3),
    "one log probability per row": lambda x: (
        x.float().log_softmax(-1, x.dtype).gather(1, _IDS[:, None])
    ),
    "several labels, one sample": lambda x: F.multilabel_margin_loss(x[0], _SEVERAL[0]),
    "several labels, none, one sample": lambda x: F.multilabel_margin_loss(
        x[0], _SEVERAL[0], reduction="none"
    ),
    "likelihood, cast": lambda x: F.nll_loss(F.log_softmax(x.float(), 1, dtype=x.dtype), _IDS),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_values_and_gradients(name: str) -> None:
    x = randn(3, 8, grad=True)
    (found,) = outputs(normalized(_FUNCTIONS[name], x), x)
    expected = _FUNCTIONS[name](x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    (grad,), (expected_grad,) = (
        torch.autograd.grad(y, x, torch.ones_like(y)) for y in (found, expected)
    )
    torch.testing.assert_close(grad, expected_grad, rtol=1e-13, atol=1e-13)


def test_a_mean_of_losses_is_a_mean() -> None:
    assert body(normalized(F.mse_loss, randn(3, 8, grad=True), _SOFT)) == [
        "%2 = aten.mse_loss(%0, %1, 0) : f64[3, 8]",
        "%3 = aten.mean(%2) : f64[]",
        "output(%3)",
    ]


@pytest.mark.parametrize("name", _ELEMENT_LOSSES)
def test_losses_of_elements_are_sharded(name: str) -> None:
    """Each rank has the losses of its features: nothing is gathered."""

    class Predicting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return _ELEMENT_LOSSES[name](self.down(self.up(x).relu()), x.softmax(-1))

    found = parity.make_case(Predicting().double(), {"x": randn(4, 8)})
    program = parity.assert_parity(found, tp=2)
    assert not list(fallbacks(program))


def test_labels_end_at_the_first_minus_one_in_a_compiled_step() -> None:
    """PyTorch's own decomposition of this loss, which traces of gradients run, reads on."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.multilabel_margin_loss(x * self.weight, _SEVERAL)

    parity.assert_parity(parity.make_case(Labelled(), {"x": randn(3, 8)}), tp=1)
