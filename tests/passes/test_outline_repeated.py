"""Modules in no list that a model calls again and again are layers; those that should not be, near
misses, are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from tests.helpers import parity
from tests.passes.test_outline import outlined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_SIZE = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_SIZE)
        self.mlp = nn.Sequential(nn.Linear(_SIZE, 32), nn.GELU(), nn.Linear(32, _SIZE))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x))
        return result


class _Norm(nn.Module):
    """As models write one: it calls no module."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.norm = nn.LayerNorm(_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.norm(x)
        return result


class _Model(nn.Module):
    """``inner`` between two linear maps, called ``times`` times."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, _SIZE), inner, nn.Linear(_SIZE, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.inner(x)
        return torch.as_tensor(self.last(x)).square().mean()


@pytest.mark.parametrize(
    ("inner", "times", "calls"),
    [
        (_Block, 3, ["", "inner", "inner", "inner", ""]),
        (lambda: nn.Sequential(_Block()), 2, ["", "inner.0", "inner.0", ""]),
        # Called once: its list is one of layers.
        (_Block, 1, ["", "inner.mlp.0", "inner.mlp.1", "inner.mlp.2", ""]),
        (_Norm, 3, [""]),
        # Its layers are layers, and what it does behind them is glue.
        (
            _Stack,
            2,
            ["", "inner.layers.0", "inner.layers.1", "", "inner.layers.0", "inner.layers.1", ""],
        ),
    ],
    ids=["block", "in a list", "once", "calls no module", "has layers"],
)
def test_what_is_a_layer(inner: Callable[[], nn.Module], times: int, calls: list[str]) -> None:
    _, program = outlined(_Model(inner(), times), torch.randn(2, 3, 4))
    assert [call.path for call in program.calls] == calls
    assert len({call.region.name for call in program.calls if call.path == "inner"}) <= 1


def test_a_looped_block_is_compiled_and_recomputed_as_one_in_a_list() -> None:
    def model(inner: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return _Model(inner, 4)

    plans = [
        sp_compiler.plan(model(inner), ((torch.randn(2, 64, 4),), {}), tp=2, recompute="full")
        for inner in (_Block(), nn.Sequential(_Block()))
    ]
    looped, listed = ((each.activation_bytes, each.activation_peak_bytes) for each in plans)
    assert looped == listed


def test_numbers_of_a_looped_block() -> None:
    """On two simulated ranks, in float64; with other weights they differ."""
    torch.manual_seed(0)
    model = _Model(_Block(), 3).double()
    inputs = {"x": torch.randn(2, 4, 4, dtype=torch.float64)}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.inner.norm.weight.add_(0.01)  # type: ignore[union-attr, operator]
    case = parity.make_case(model, inputs, lift_casts=False)
    step = parity.simulate(case, parity.compiled(case, tp=2))
    for eager, is_right in ((model, True), (other, False)):
        eager(**inputs).backward()
        true = {name: parameter.grad for name, parameter in eager.named_parameters()}
        assert (parity.gradient_error(step.grads, true, floor=1e-3) < 1e-12) == is_right
