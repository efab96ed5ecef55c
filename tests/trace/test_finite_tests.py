"""Forwards that ask whether all numbers of a tensor are finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers import parity


class Clamped(nn.Module):
    """Clamps what is not finite, and goes on with it before and after."""

    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        h = residual = self.up(x)
        if self.asks(h):
            h = h.clamp(-10, 10)
        return self.down(h.relu() + residual).square().mean()


def _in_two_steps(h: Tensor) -> Tensor:
    finite = h.isfinite().all(-1)
    return torch.logical_not(finite.all())


def _without_gradients(h: Tensor) -> bool:
    with torch.no_grad():
        return not h.isfinite().all()


def _one_after_the_other(h: Tensor) -> Any:
    nan, infinite = torch.isnan(h).any(), torch.isinf(h).any()
    return nan or infinite


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "not all finite": lambda h: not torch.isfinite(h).all(),
    "any infinite": lambda h: torch.isinf(h).any() or h.isnan().any().item(),
    "combined": lambda h: (h.isinf() | h.isnan()).any(),
    "in two steps": _in_two_steps,
    "one after the other": _one_after_the_other,
    "without gradients": _without_gradients,
    "of a copy": lambda h: (h.detach().clone() * 2).isinf().any(),
    "of a part": lambda h: h.chunk(2, -1)[0].isinf().any(),
    "counted": lambda h: h.isnan().sum() != 0 or torch.isinf(h).sum(-1).sum().item() > 0,
    "beside a constant": lambda h: torch.isinf(h).any() | False,
}


def _model(asks: Callable[[Tensor], Any]) -> Clamped:
    torch.manual_seed(0)
    return Clamped(asks).double()


def _x() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_branch_of_finite_numbers_has_the_gradients_of_eager() -> None:
    model, x = _model(ASKS["not all finite"]), _x()
    case = parity.make_case(model, {"x": x})
    loss = model(x)
    loss.backward()
    true = {key: value.grad for key, value in model.named_parameters()}
    assert parity.gradient_error(case.grads, true) < 1e-14
    assert not case.program.decisions


@pytest.mark.parametrize("name", ASKS)
def test_other_numbers_show_in_what_is_returned(name: str) -> None:
    """Infinite ones would else be lost where a loss saturates; so are those beside the test."""
    model, x = _model(ASKS[name]), _x()
    captured = capture(model, (x,)).module
    torch.testing.assert_close(captured(*model.parameters(), x)[0], model(x), rtol=1e-14, atol=0)
    model.up.bias.data[3] = -torch.inf
    assert model(x).isinf()  # of the residual; the branch is clamped
    loss = captured(*model.parameters(), x)[0]
    (grad,) = torch.autograd.grad(loss, model.down.bias)
    assert loss.isnan()
    assert grad.isnan().all()


def test_numbers_that_were_not_asked_for_stay() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            scores = (h @ h.mT).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
            if torch.isnan(scores).any():
                scores = torch.nan_to_num(scores)
            return scores.softmax(-1) @ h

    model, x = Masked(4, 4).double(), _x()
    captured = capture(model, (x,)).module
    torch.testing.assert_close(captured(*model.parameters(), x)[0], model(x), rtol=1e-14, atol=0)


def _written_later(h: Tensor) -> Any:
    bad = h.isinf().any()
    bad |= (h > 3).any()
    return bad


def _marked_by_hand(h: Tensor) -> Any:
    bad = h.isinf()
    bad[0] = True
    return bad.any()


@pytest.mark.parametrize(
    "asks",
    [
        _written_later,
        _marked_by_hand,
        lambda h: not torch.isfinite(h).any(),  # true of finite numbers, but not only of them
        lambda h: (h.isinf() | (h > 3)).any(),
        lambda h: (h > 3).any(),
        lambda h: h.isfinite().sum() == 0,  # how many there are is not known
        lambda h: (h > 3).sum() == 0,
    ],
)
def test_other_questions_are_refused(asks: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"parameter 'up.weight'.*test_finite_tests.py:"):
        capture(_model(asks), (_x(),))


class Distributed(nn.Module):
    """A loss by ``torch.distributions``, which asks whether what it is given is valid."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.up(x))


@pytest.fixture
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile switches the checks off for the rest of a process; other tests have called
    it."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


def _normal(h: Tensor) -> Tensor:
    mean, log_scale = h.chunk(2, -1)
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return distributions.kl_divergence(distributions.Normal(mean, log_scale.exp()), prior).mean()


def _categorical(h: Tensor) -> Tensor:
    chosen = distributions.Categorical(logits=h)
    return (chosen.log_prob(h.argmax(-1)) + chosen.entropy()).mean()


def _of_probabilities(h: Tensor) -> Tensor:
    """Their sums, which it divides by and which its check compares, are no counts of what is not
    finite."""
    chosen = distributions.Categorical(h.sigmoid())
    return (chosen.log_prob(h.argmax(-1)) + chosen.probs.sum(-1)).mean()


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("loss", [_normal, _categorical, _of_probabilities])
def test_distributions_are_given_valid_numbers(loss: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Distributed(loss).double(), _x()
    case = parity.make_case(model, {"x": x})
    parity.assert_parity(case, tp=2)
    model(x).backward()
    true = {key: value.grad for key, value in model.named_parameters()}
    assert parity.gradient_error(case.grads, true) < 1e-14
    model.up.bias.data[3] = torch.nan
    with pytest.raises(ValueError, match="invalid values"):
        model(x)
    captured = capture(model, (x,)).module
    assert captured(*model.parameters(), x)[0].isnan()


@pytest.mark.usefixtures("_checked")
def test_other_numbers_of_a_distribution_show() -> None:
    """A negative scale has a square all the same."""

    def loss(h: Tensor) -> Tensor:
        return distributions.Normal(h.sin(), h + 10).variance.mean()

    torch.manual_seed(0)
    model, x = Distributed(loss).double(), _x()
    captured = capture(model, (x,)).module
    torch.testing.assert_close(captured(*model.parameters(), x)[0], model(x), rtol=1e-14, atol=0)
    model.up.bias.data[3] = -20
    assert captured(*model.parameters(), x)[0].isnan()


def test_a_constant_decides() -> None:
    model, x = _model(lambda h: h.isinf().any() | True), _x()
    captured = capture(model, (x,)).module
    torch.testing.assert_close(captured(*model.parameters(), x)[0], model(x), rtol=1e-14, atol=0)


def test_something_returned_has_to_show_it() -> None:
    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h.argmax(-1) if torch.isfinite(h).all() else h.argmin(-1)

    with pytest.raises(CaptureError, match="no floating-point tensor"):
        capture(Counted(4, 4), (_x().float(),))
