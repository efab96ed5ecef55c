"""In-place changes of what a compiled module returns, where results share memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.storage import share_elements, sharing_elements


class _Returns(nn.Module):
    def __init__(self, views: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8).double()
        self.views = views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.views(self.up(x).tanh())


def _loss(outputs: tuple[Tensor, ...]) -> Tensor:
    terms = [(out.sin() * (index + 1)).sum() for index, out in enumerate(outputs)]
    return torch.stack(terms).sum()


_OVERLAPPING: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a view of another": lambda y: (y, y.view(-1)),
    "a row of another": lambda y: (y, y[0]),
    "rows of neither": lambda y: (y[:2], y[1:]),
}


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("views", _OVERLAPPING.values(), ids=_OVERLAPPING)
def test_a_change_that_another_result_sees_raises(
    views: Callable[[Tensor], tuple[Tensor, ...]], changed: int
) -> None:
    """The gradient of the change was missing in the other result."""
    module: Any = sp_compiler.compile(_Returns(views), tp=1)
    outputs = module(torch.randn(3, 8, dtype=torch.float64))

    def step() -> None:
        outputs[changed].mul_(3)
        _loss(outputs).backward()

    with pytest.raises(RuntimeError, match="modified inplace"):
        step()


class _HiddenStates(nn.Module):
    """Returns what the next part reads, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.layers[0](x)
        second = self.layers[1](first.tanh())
        return first, second, second[:, :2].sum()


def test_a_result_that_the_model_reads_may_be_changed() -> None:
    module: Any = sp_compiler.compile(_HiddenStates(), tp=1, recompute="none")
    model, x, gradients = _HiddenStates(), torch.randn(3, 8, dtype=torch.float64), []
    for one in (module, model):
        outputs = one(x)
        for out in outputs:
            out.mul_(3)
        _loss(outputs).backward()
        gradients.append(one.get_parameter("layers.0.weight").grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


_DISJOINT: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rows": lambda y: (y[0], y[1:]),
    "columns": lambda y: (y[:, :3], y[:, 3:]),
    "every second": lambda y: (y[:, ::2], y[:, 1::2]),
    "none at all": lambda y: (y, y[:0], y[:, 1:1]),
}


@pytest.mark.parametrize("views", _DISJOINT.values(), ids=_DISJOINT)
def test_parts_without_a_common_element_may_be_changed(
    views: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    model = _Returns(lambda y: views(y * 2))
    module: Any = sp_compiler.compile(copy.deepcopy(model), tp=1, recompute="full")
    x, gradients = torch.randn(3, 8, dtype=torch.float64), []
    for one in (module, model):
        outputs = one(x)
        outputs[0].mul_(3)
        _loss(outputs).backward()
        gradients.append(one.get_parameter("up.weight").grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_common_elements_are_found() -> None:
    base, draw = torch.arange(400), random.Random(0)
    for _ in range(2000):
        strides = draw.choices([0, 1, 2, 3, 4, 6, 8, 12, 24], k=draw.randint(0, 3))
        pair = [
            base.as_strided([draw.randint(1, 4) for _ in strides], strides, draw.randint(0, 60))
            for _ in range(2)
        ]
        first, second = (set(view.flatten().tolist()) for view in pair)
        common = bool(first & second)
        assert share_elements(*pair) == common, [view.stride() for view in pair]
        assert len(sharing_elements(pair)) == 2 * common
    # Of unequal strides all memory between a view's ends counts as its own.
    assert not share_elements(base[:8], base[8:32:3])
    assert share_elements(base[::2], base[1::4])
    numbers = torch.zeros(8)
    complex_numbers = torch.view_as_complex(numbers.view(4, 2))
    assert share_elements(complex_numbers[:2], numbers[2:])
    assert not share_elements(complex_numbers[:2], numbers[4:])


class _Copies(nn.Module):
    """Returns a value, and a copy of that or of what the caller has."""

    def __init__(self, copied: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8).double()
        self.register_buffer("table", torch.randn(8, dtype=torch.float64))
        self.copied = copied

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.up(x).tanh()
        return y, self.copied(self, x, y)


_COPIED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "an input": lambda model, x, y: x.clone(),
    "an input in its own dtype": lambda model, x, y: x.to(torch.float64, copy=True),
    "a parameter": lambda model, x, y: model.up.weight.detach().clone(),
    "a buffer": lambda model, x, y: model.table.clone(),
    "a constant": lambda model, x, y: torch.tensor([1.0, 2.0]),
    "the other result": lambda model, x, y: y.clone(),
    "a row of a copy": lambda model, x, y: y.clone()[0],
    "a copy of a row": lambda model, x, y: y.clone()[:, 1:].contiguous(),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("copied", _COPIED.values(), ids=_COPIED)
def test_the_caller_may_change_a_copy(
    copied: Callable[[Any, Tensor, Tensor], Tensor], grad: bool
) -> None:
    model, x = _Copies(copied), torch.randn(3, 8, dtype=torch.float64)
    module: Any = sp_compiler.compile(copy.deepcopy(model), tp=1)
    expected = model(x)
    before = {key: value.clone() for key, value in {"x": x, **module.state_dict()}.items()}
    for changed in (1, 0, 1):  # a constant that was changed shows in the next call
        with torch.set_grad_enabled(grad):
            outputs = module(x)
        torch.testing.assert_close(outputs, expected)
        with torch.no_grad():
            outputs[changed].fill_(7.0)
        torch.testing.assert_close(outputs[1 - changed], expected[1 - changed])
        torch.testing.assert_close({"x": x, **module.state_dict()}, before)
