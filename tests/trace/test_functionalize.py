"""Functional graphs without another trace: the same operators as with one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers import parity
from tests.helpers.slow import slow
from tests.models import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class _Of(nn.Module):
    """A function of a tensor between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x))).sum()


@torch.no_grad()
def _scale(x: Tensor) -> Tensor:
    with torch.enable_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return scale.to(torch.float32).clamp(min=1e-3)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "views and casts": lambda x: (
        x.mT.contiguous().chunk(2, -1)[0].flatten().to(x.dtype).view(8, -1).T
    ),
    "equal calls": lambda x: x.chunk(2, -1)[0].repeat(1, 2) * x.chunk(2, -1)[1].repeat(1, 2),
    "one of several results": lambda x: torch.cat([x.unbind(-1)[3][:, None], x[..., 1:]], -1),
    "regions without gradient": lambda x: x / _scale(x) + x.detach(),
    "a generator of masks": lambda x: x.masked_fill(torch.ones_like(x).tril().bool(), 0.5),
}
WRITING: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: (x * 2).add_(1.0),
    "through a view": lambda x: _written(x),
    "a new constant": lambda x: x * torch.tensor([1.0, 2.0] * 4),
}


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2].mul_(3.0)
    return y


def _listing(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> list[str]:
    """Every node: operator, operands by number, shape, whether it requires a gradient, module."""
    captured = capture(model, args, kwargs)
    normalize(captured)  # which drops the copies that make a reshape possible
    numbers: dict[torch.fx.Node, str] = {}
    lines = []
    for node in captured.module.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        target = "" if node.op == "placeholder" else str(node.target)
        operands = torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        shape = getattr(node.meta.get("val"), "shape", "")
        stack = list(node.meta.get("nn_module_stack", {}))[-1:]
        lines.append(f"{target}{operands} {shape} {node.meta.get('requires_grad')} {stack}")
    return lines


def _count_traces(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    traced, trace = [], ExportedProgram.run_decompositions

    def spy(self: ExportedProgram, *args: object) -> ExportedProgram:
        traced.append(self)
        return trace(self, *args)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", spy)
    return traced


def _with_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_compiler.trace.functionalize._is_simple", lambda node: False)


@pytest.mark.parametrize("name", ["llama", *map(slow, ("gpt2", "vit", "encoder", "peft_llama"))])
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = zoo.build(name, dropout=0.1), zoo.inputs(name)
    traced = _count_traces(monkeypatch)
    actual = _listing(model, **kwargs)
    assert not traced
    _with_another_trace(monkeypatch)
    assert actual == _listing(model, **kwargs)
    assert traced


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Of(FUNCTIONS[case]), torch.randn(8, 8)
    traced = _count_traces(monkeypatch)
    actual = _listing(model, x)
    assert not traced
    _with_another_trace(monkeypatch)
    assert actual == _listing(model, x)


@pytest.mark.parametrize("case", WRITING)
def test_what_writes_is_traced_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _count_traces(monkeypatch)
    listing = _listing(_Of(WRITING[case]), torch.randn(8, 8))
    assert traced
    assert not any(re.match(r"aten\.\w+_\.", line) for line in listing)


def test_autocast_around_the_call_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _count_traces(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        listing = _listing(_Of(torch.tanh), torch.randn(8, 8))
    assert traced
    assert any("torch.bfloat16" in line for line in listing)


@torch.no_grad()
def _cast(x: Tensor) -> Tensor:
    return x.to(x.dtype)


@torch.no_grad()
def _largest(x: Tensor) -> Tensor:
    return _cast(x).type_as(x).abs().amax()


@torch.no_grad()
def _evaluated(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, training=False)


@torch.no_grad()
def _outside_of_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.to(torch.float64)


@torch.no_grad()
def _outside_of_autocast_in_turn(x: Tensor) -> Tensor:
    return _outside_of_autocast(_cast(x)) * 2


def _inside_of_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return _cast(x) * x.abs().amax()


WITHOUT_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "a cast for a statistic": lambda x: x / _largest(x),
    "a cast that is returned": lambda x: x * _cast(x),
    "dropout in eval mode": lambda x: x * _evaluated(x),
    "autocast switched off": lambda x: x * _outside_of_autocast(x),
    "inside of autocast": lambda x: x * _inside_of_autocast(x),
    "regions in regions": lambda x: x * _outside_of_autocast_in_turn(x),
    "a cast that changes something": lambda x: x * _cast(x.float()),
}


@pytest.mark.parametrize("writes", [False, True])  # the other way, with another trace
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_no_gradient_is_lost_or_added(name: str, writes: bool) -> None:
    """Mostly of ``to``, which returns the tensor itself if it changes nothing, even in no_grad."""
    model = _Of(lambda x: WITHOUT_GRADIENT[name](_written(x) if writes else x)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    captured = parity.make_case(model, {"x": x}, lift_casts=False)
    model(x).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(captured.grads[key], parameter.grad)


class Scaled(nn.Module):
    def forward(self, x: Tensor, times: int) -> Tensor:
        return x[:, :times] * times


def test_a_whole_number_leaves_sizes_open() -> None:
    captured = capture(Scaled(), (torch.randn(5, 6), 3), {}, open_dims=True)
    assert captured.sizes is not None
    captured.sizes.require_known()
    assert captured.sizes.rejection([torch.randn(7, 9), 3]) is None


class Counting(nn.Module):
    """Counts its numbers without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            count = x.shape[0] * x.shape[1]
            self.get_buffer("seen").add_(count)
        return x * count


def test_sizes_inside_of_no_grad_stay_open() -> None:
    captured = capture(Counting(), (torch.randn(5, 6),), {}, open_dims=True)
    assert captured.sizes is not None
    captured.sizes.require_known()


class Named(nn.Module):
    def forward(self, b: Tensor, size1: Tensor) -> Tensor:
        return b + size1


def test_sizes_have_no_names_of_inputs() -> None:
    ids = torch.ones(5, 6, dtype=torch.int64)
    captured = capture(Named(), (ids, torch.randn(5, 6)), {}, open_dims=True)
    assert captured.sizes is not None
    assert [size.name for size in captured.sizes.distinct] == ["size0", "s"]


class _Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]


def test_control_flow_is_refused_with_its_line() -> None:
    said = r"(?s)operator cond .*torch\.where in place of torch\.cond.*return torch\.cond\("
    with pytest.raises(UnsupportedError, match=said):
        capture(_Conditional(), (torch.randn(2, 8),), {})
