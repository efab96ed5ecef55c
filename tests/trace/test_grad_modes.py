"""Parts of a model without gradients, beside autocast and what nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.trace.export import capture
from sp_compiler.verification.reference import run_captured

Function = Callable[[nn.Module, Tensor], Tensor]


def _bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _inside(linear: nn.Module, x: Tensor) -> Tensor:
    with _bfloat16():
        x = x * 2
        with torch.no_grad():
            y = linear(x)
        return y + x


def _around(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), _bfloat16():
        y = linear(x)
    return x * y


def _between(linear: nn.Module, x: Tensor) -> Tensor:
    with _bfloat16():
        with torch.no_grad(), _bfloat16(enabled=False):
            y = linear(x)
            with torch.enable_grad():
                y = y + linear(x.exp())
            y = y * x
        return linear(x) * y.tanh()


def _for_inference(linear: nn.Module, x: Tensor) -> Tensor:
    with _bfloat16(), torch.inference_mode():
        y = linear(x)
    return x + y


def _in_a_part(linear: nn.Module, x: Tensor) -> Tensor:
    with _bfloat16():
        y = linear(x)
        with torch.no_grad():
            scale = y.abs().amax()
        y = y / scale
    return y


@pytest.mark.parametrize("function", [_inside, _around, _between, _for_inference, _in_a_part])
def test_no_gradient_comes_from_inside_of_autocast(function: Function) -> None:
    captured, expected = _gradients(function)
    assert [grad is None for grad in captured] == [grad is None for grad in expected]
    torch.testing.assert_close(captured, expected, rtol=1e-6, atol=0)


def _read_by_nobody(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    y.detach().sum().to(torch.float64)
    with torch.no_grad():
        scale = y.abs().amax()
    return y / scale


def test_what_nobody_reads_beside_a_part_without_gradients() -> None:
    torch.testing.assert_close(*_gradients(_read_by_nobody), rtol=1e-6, atol=0)


def _gradients(function: Function) -> list[tuple[Tensor | None, ...]]:
    """Gradients of a weight and of an input, of the captured ``function`` and of itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.linear, x).square().sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4, requires_grad=True)
    params = dict(model.named_parameters())
    captured = capture(model, (x,))
    losses = [run_captured(captured, params, {}, [x]).outputs[0], model(x)]
    inputs = [*params.values(), x]
    return [torch.autograd.grad(loss, inputs, allow_unused=True) for loss in losses]
