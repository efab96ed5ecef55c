"""Blocks in no list that go on from each other, in a loop or one behind the other, are layers; near
misses are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.errors import ArgumentError
from sp_compiler.pipeline_parallel.cutting import check_layers
from tests.helpers import parity
from tests.passes.test_outline import outlined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_SIZE = 8
_LINEARS_OF_INNER = [f"inner.mlp.{index}" for index in range(3)]
_LINEARS = [f"inner.first.mlp.{index}" for index in range(3)]


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


class _Named(nn.Module):
    """Modules one behind the other, each with a name of its own."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def _line() -> nn.Module:
    return _Named(only=nn.Linear(_SIZE, _SIZE))


class _Beside(nn.Module):
    """Modules of one class that all take the same, as queries, keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _line(), _line()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.left(x) * self.right(x)
        return result


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = nn.Linear(_SIZE, _SIZE), nn.Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return (self.old(state) + self.new(x)).tanh()


class _Recurrent(nn.Module):
    """A cell that takes a token each time: its loop is over the tokens, not into the depth."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = _Cell()

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            state = self.cell(token, state)
        return state


class _WithShared(nn.Module):
    """A block that is called before the layers, and by them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _line()
        self.layers = nn.ModuleList(_Calling() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.shared(x)
        for layer in self.layers:
            x = layer(x, self.shared)
        return x


class _Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        result: Tensor = other(self.line(x))
        return result


class _Wide(nn.Module):
    """Most of what it computes is no repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _line(), _line()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        for _ in range(9):
            x = x.sin() * x
        return x


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
        (_Block, 1, ["", *_LINEARS_OF_INNER, ""]),
        (_Norm, 3, [""]),
        # Its layers are layers, and what it does behind them is glue.
        (
            _Stack,
            2,
            ["", "inner.layers.0", "inner.layers.1", "", "inner.layers.0", "inner.layers.1", ""],
        ),
        (
            lambda: _Named(first=_Block(), second=_Block()),
            1,
            ["", "inner.first", "inner.second", ""],
        ),
        # The outermost that occurs several times.
        (lambda: _Named(first=_Block(), second=_Block()), 2, ["", "inner", "inner", ""]),
        # Side by side, but each of its own class.
        (lambda: _Named(first=_Block(), second=_line()), 1, ["", *_LINEARS, ""]),
        (lambda: _Named(first=nn.Linear(_SIZE, _SIZE), second=nn.Linear(_SIZE, _SIZE)), 1, [""]),
        # What is in them are layers already.
        (
            lambda: _Named(first=nn.Sequential(nn.Tanh()), second=nn.Sequential(nn.Sigmoid())),
            1,
            ["", "inner.first.0", "inner.second.0", ""],
        ),
        (_Beside, 1, [""]),
        (_Recurrent, 1, [""]),
        (_WithShared, 1, ["", "inner.layers.0", "inner.layers.1", ""]),
        (_Wide, 1, [""]),
    ],
    ids=[
        *("block", "in a list", "once", "calls no module", "has layers"),
        *("one behind the other", "the same, in a loop", "of two classes", "calling no modules"),
        *("lists", "side by side", "by token", "called by layers", "a small part"),
    ],
)
def test_what_is_a_layer(inner: Callable[[], nn.Module], times: int, calls: list[str]) -> None:
    _, program = outlined(_Model(inner(), times), torch.randn(2, 3, 4))
    assert [call.path for call in program.calls] == calls


@pytest.mark.parametrize(
    ("alone", "listed", "times"),
    [
        (_Block, lambda: nn.Sequential(_Block()), 4),
        (
            lambda: _Named(**{name: _Block() for name in "abcd"}),
            lambda: nn.Sequential(*(_Block() for _ in range(4))),
            1,
        ),
    ],
    ids=["in a loop", "one behind the other"],
)
def test_they_are_compiled_and_recomputed_as_in_a_list(
    alone: Callable[[], nn.Module], listed: Callable[[], nn.Module], times: int
) -> None:
    plans = [
        sp_compiler.plan(
            _Model(inner(), times), ((torch.randn(2, 64, 4),), {}), tp=2, recompute="full"
        )
        for inner in (alone, listed)
    ]
    first, second = (
        ([block.num_calls for block in each.blocks], each.activation_peak_bytes) for each in plans
    )
    assert first == second
    assert first[0] == [1, 4, 1]


@pytest.mark.parametrize(
    ("model", "num_layers"),
    [
        (_Model(_line(), 3), 3),
        (_Model(_Named(first=_line(), second=_line()), 1), 2),
        (_Model(_Norm(), 3), 0),
    ],
    ids=["in a loop", "one behind the other", "no layer"],
)
def test_stages_of_a_pipeline_begin_at_them(model: nn.Module, num_layers: int) -> None:
    x = torch.randn(2, 3, 4)
    if num_layers:
        check_layers(model, (x,), {}, num_layers)
    with pytest.raises(ArgumentError, match=f"{num_layers} layers, too few for"):
        check_layers(model, (x,), {}, max(num_layers, 1) + 1)


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
