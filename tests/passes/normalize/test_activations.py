"""Activation functions in the spellings of models: by one operator, with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from sp_compiler.passes.normalize.activations import name_activations
from tests.helpers import parity
from tests.helpers.normalized import normalized, outputs, randn

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def _megatron(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _by_cube(x: Tensor, factor: float = 0.044715) -> Tensor:
    inner = _SQRT_2_OVER_PI * (x + factor * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _used_inside(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return x * gate + gate


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


def _in_16_bits(x: Tensor) -> Tensor:
    return (x * torch.sigmoid(x.bfloat16())).float()


_SPELLINGS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **{f"ACT2FN {name}": (ACT2FN[name], "gelu") for name in ("gelu_new", "gelu_fast")},
    "GPT-2's": (_by_cube, "gelu"),
    "Megatron's": (_megatron, "gelu"),
    "with erf": (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
    "with erf of a product": (lambda x: 0.5 * (x + x * torch.erf(x * math.sqrt(0.5))), "gelu"),
    "swish": (lambda x: x * torch.sigmoid(x), "silu"),
    "swish by exp": (lambda x: x / (1 + torch.exp(-x)), "silu"),
    "swish by tanh": (lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x)), "silu"),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
    "of a function of its own": (lambda x: _by_cube(torch.sin(x)), "gelu"),
}


@pytest.mark.parametrize("case", _SPELLINGS)
def test_spellings(case: str) -> None:
    function, operator = _SPELLINGS[case]
    x = randn(3, 5, grad=True).float()
    captured = normalized(function, x)
    called = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    names = [node.target.__name__.split(".")[0] for node in called]
    assert names == (["sin", operator] if "of its own" in case else [operator])
    if operator == "gelu":
        approximate = called[-1].kwargs.get("approximate", "none")
        assert approximate == ("none" if "erf" in case else "tanh")
    wide = torch.linspace(-30, 30, 15).view(3, 5)
    for given in (x, wide):
        torch.testing.assert_close(outputs(captured, given)[0], function(given))
    before = str(captured.module.graph)
    name_activations(captured.module.graph)
    assert str(captured.module.graph) == before


_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "another constant": lambda x: _by_cube(x, 0.0447),
    "quick GELU": ACT2FN["quick_gelu"],
    "gate of another tensor": lambda x: x * torch.sigmoid(x.mT),
    "gate that is read twice": _used_inside,
    "gate in 16 bits": _in_16_bits,
    "gate of a row": lambda x: x * torch.sigmoid(x[:1]),
    "gate with a stopped gradient": lambda x: x * torch.sigmoid(x).detach(),
    "gate without a gradient": _without_gradient,
    "bound far away": lambda x: (x * torch.sigmoid(x)).clamp(-64000, 64000),
    "replaced NaN": lambda x: torch.nan_to_num(x * torch.sigmoid(x)),
    "alone": torch.sigmoid,
    # Seven digits of a constant are all that float32 has, but not float64.
    "fewer digits than the dtype": lambda x: _megatron(x.double()),
}


@pytest.mark.parametrize("case", _OTHERS)
def test_near_misses(case: str) -> None:
    function = _OTHERS[case]
    x = randn(5, 5, grad=True).float()
    captured = normalized(function, x)
    called = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    names = {node.target.__name__.split(".")[0] for node in called}
    # Of a bound the function inside of it is an operator, and the bound stays.
    assert not {"gelu", "silu", "mish"} & names or {"clamp", "nan_to_num"} & names
    for given in (x, 1e6 * x, torch.full_like(x, math.nan)):
        result = outputs(captured, given)[0]
        torch.testing.assert_close(result, function(given), equal_nan=True)


class _Gated(nn.Module):
    """Two layers that spell their activation, of whose parts the last is a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(_by_cube(up(x)))
        return (x * torch.sigmoid(x)).square().mean()


class _Gate(nn.Module):
    def forward(self, x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        return x if gate is None else x * gate, torch.sigmoid(x)


class _AcrossLayers(nn.Module):
    """Each layer multiplies by the gate that the layer before has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Gate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate = None
        for layer in self.layers:
            x, gate = layer(x, gate)
        return x


def test_layers_stay_apart() -> None:
    x = randn(3, 5, grad=True)
    captured = normalized(_AcrossLayers(), x)
    called = [node.target for node in captured.module.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.aten.sigmoid.default) == 2
    assert torch.ops.aten.silu.default not in called


def test_numbers_of_a_model() -> None:
    torch.manual_seed(0)
    model = _Gated().double()
    case = parity.make_case(model, {"x": torch.randn(2, 8, 16, dtype=torch.float64)})
    program = parity.assert_parity(case, tp=2, recompute="none")
    assert program.code.count("F.gelu(") == 1  # in a region that both layers share
    assert "torch.tanh(" not in program.code
    assert "torch.sigmoid(" not in program.code
