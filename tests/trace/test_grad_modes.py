"""Parts of a model without gradients, beside autocast and what nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.errors import UnsupportedError
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


def _that_returns_itself(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    with torch.no_grad():
        scale = torch.dropout(y.float().flatten(0, 0).contiguous(), 0.5, False).abs().amax()
    return y / scale


def _of_a_parameter(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        norm = linear.weight.float().norm()
    return linear(x) / norm


def _and_of_its_views(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.reshape(3, 4)
    return linear(x) * y


def _that_is_written_later(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.zeros_like(x)
    y.copy_(linear(x))
    return y


def _that_writes_what_has_a_gradient(linear: nn.Module, x: Tensor) -> Tensor:
    y, made = linear(x), torch.zeros_like(x)
    with torch.no_grad():
        made[:, 0] = y[:, 1]
        with _bfloat16():
            made.mul_(linear(x).float())
    made[:, 1:] += y[:, 1:]
    return made * y


def _that_is_written_there(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    with torch.no_grad():
        weights = y.float().softmax(-1)
        weights[:, 0] = 1
        weights.clamp_(0.1, 0.9)
    y.div_(weights.sum())
    return y * weights


def _that_writes_what_is_read_detached_alone(linear: nn.Module, x: Tensor) -> Tensor:
    target = linear(x * 2).detach().view(-1, x.shape[-1])
    target.mul_(2)
    with torch.no_grad():
        other = linear(x * 3)
        other.clamp_(-1, 1)
    return (linear(x) - target.view_as(x)) * other.detach()


def _that_is_data(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    rounded = y + (y.round() - y).data
    made = torch.zeros_like(x.data)
    made.data.copy_(linear.get_parameter("weight").data[0])
    made.data += y.data.abs().amax(-1, keepdim=True)
    return rounded * made


@pytest.mark.parametrize(
    "function",
    [
        _that_is_data,
        _that_writes_what_is_read_detached_alone,
        _that_returns_itself,
        _of_a_parameter,
        _and_of_its_views,
        _that_is_written_later,
        _that_is_written_there,
        _that_writes_what_has_a_gradient,
    ],
)
def test_gradients_beside_a_part_without(function: Function) -> None:
    captured, expected = _gradients(function)
    torch.testing.assert_close(captured, expected, rtol=1e-6, atol=0)


def _under_no_grad(y: Tensor) -> None:
    with torch.no_grad():
        y[:, 0] = 0


def _under_autocast_too(y: Tensor) -> None:
    with _bfloat16(), torch.no_grad():
        y.sub_(y.amax())


def _into_a_detached_view(y: Tensor) -> None:
    y.detach()[0].mul_(2)


def _into_data(y: Tensor) -> None:
    y.data.clamp_(-1, 1)


def _one_of_a_list(y: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([torch.ones_like(y), y], 2.0)


@pytest.mark.parametrize(
    "write",
    [_under_no_grad, _under_autocast_too, _into_a_detached_view, _into_data, _one_of_a_list],
)
def test_writes_that_a_gradient_does_not_notice_are_refused(write: Callable[..., None]) -> None:
    def function(linear: nn.Module, x: Tensor) -> Tensor:
        y = linear(x)
        write(y)
        return y

    with pytest.raises(
        UnsupportedError, match=r"writes in place.*\(new - x\)\.detach\(\)"
    ) as error:
        _gradients(function)
    assert "write(y)" in str(error.value) or "test_grad_modes.py" in str(error.value)


def test_detaching_in_place_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"detach_\(\).* write x = x\.detach\(\)"):
        _gradients(lambda linear, x: linear(x).mul(2).detach_() * x)


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


class Hidden(nn.Module):
    """A layer that is no module of the model, in a list."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(4, 4), [nn.Linear(4, 4)]
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.function(self.hidden[0], x)


def _trained(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x)


@torch.no_grad()
def _taught(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x)


def _shaped(linear: nn.Module, x: Tensor) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return torch.zeros_like(weight).sum() + linear(x).argmax() + linear(x).detach()


def test_a_tensor_that_would_get_no_gradient_is_refused() -> None:
    """Its name is not among the model's parameters, so no program returns its gradient."""
    x = torch.randn(2, 4)
    said = r"\(4, 4\) that requires a gradient and is not read.*test_grad_modes.py:\d+ return"
    with pytest.raises(UnsupportedError, match=said):
        capture(Hidden(_trained), (x,), {})
    for function in (_taught, _shaped):
        capture(Hidden(function), (x,), {})
    frozen = Hidden(_trained)
    frozen.hidden[0].requires_grad_(False)
    capture(frozen, (x,), {})
    scaled = Hidden(lambda linear, x: scaled.scale * x)
    scaled.register_buffer("scale", torch.ones(4, requires_grad=True))
    with pytest.raises(UnsupportedError, match="buffer 'scale' requires a gradient"):
        capture(scaled, (x,), {})
    scaled.function = lambda linear, x: scaled.scale.detach() * x
    capture(scaled, (x,), {})
