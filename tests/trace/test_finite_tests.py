"""Forwards that ask whether all numbers of a tensor are finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.errors import CaptureError
from sp_compiler.ir.fx import calls
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


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "not all finite": lambda h: not torch.isfinite(h).all(),
    "any infinite": lambda h: torch.isinf(h).any() or h.isnan().any().item(),
    "combined": lambda h: (h.isinf() | h.isnan()).any(),
    "in two steps": _in_two_steps,
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
def test_other_numbers_show_in_the_loss(name: str) -> None:
    """Infinite ones would else be lost where a loss saturates."""
    model, x = _model(ASKS[name]), _x()
    captured = capture(model, (x,)).module
    torch.testing.assert_close(captured(*model.parameters(), x)[0], model(x), rtol=1e-14, atol=0)
    model.up.bias.data[3] = -torch.inf
    assert model(x).isinf()  # of the residual; the branch is clamped
    assert captured(*model.parameters(), x)[0].isnan()


def _elsewhere(h: Tensor) -> Tensor:
    finite = h.isfinite()
    h.mul_(2)
    return ~finite.all()


def _without_gradients(h: Tensor) -> bool:
    with torch.no_grad():
        return not h.isfinite().all()


@pytest.mark.parametrize(
    "asks",
    [
        _elsewhere,  # the numbers asked for are no longer there to be marked
        _without_gradients,  # a mark would stop gradients
        lambda h: h.chunk(2, -1)[0].isinf().any(),  # torch allows no write into it
        lambda h: not torch.isfinite(h).any(),  # true of finite numbers, but not only of them
        lambda h: (h.isinf() | (h > 3)).any(),
        lambda h: (h > 3).any(),
    ],
)
def test_other_questions_are_refused(asks: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"parameter 'up.weight'.*test_finite_tests.py:"):
        capture(_model(asks), (_x(),))


def test_a_question_about_a_parameter_is_refused() -> None:
    model = _model(lambda h: not model.up.weight.view(-1).isfinite().all())
    with pytest.raises(CaptureError, match=r"parameter 'up.weight'"):
        capture(model, (_x(),))


def test_numbers_that_are_asked_for_twice_are_marked_once() -> None:
    captured = capture(_model(lambda h: (h.isinf() | h.isnan()).any()), (_x(),))
    graph = captured.module.graph
    (mark,) = calls(graph, torch.ops.aten.masked_fill.Scalar)
    assert mark.args[0].target is torch.ops.aten.linear.default
    # All that uses the tensor from there on: the branch and the residual.
    assert len(mark.users) == 2
    integers = nn.Sequential(nn.Linear(4, 4)).double()
    integers.forward = lambda x: integers[0](x) * (2 if x.long().isfinite().all() else 1)
    graph = capture(integers, (_x(),)).module.graph
    assert not list(calls(graph, torch.ops.aten.masked_fill.Scalar))
