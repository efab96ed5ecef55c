"""One module under two names, such as an activation of all layers: the forward sees the model's own
modules, as it does without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from tests.helpers.users import assert_same_gradients, batch

_WIDTH = batch().shape[-1]


class Layer(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(_WIDTH, 16), nn.Linear(16, _WIDTH), act
        self.scale = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(x)))


class Net(nn.Module):
    """``ask(net, layer)``: whether a norm follows the layer."""

    def __init__(
        self, ask: Callable[[Any, Any], bool], order: Callable[[Any], Iterable[Any]]
    ) -> None:
        super().__init__()
        act = nn.PReLU()
        self.layers = nn.ModuleList(Layer(act) for _ in range(3))
        self.tail = nn.Sequential(*[Layer(act) for _ in range(3)])
        self.norm = nn.LayerNorm(_WIDTH)
        self.ask, self.order = ask, order

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order(self):
            x = layer(x)
            if self.ask(self, layer):
                x = self.norm(x)
        return x.square().sum()


def _never(net: Any, layer: Any) -> bool:
    return False


def _assert_like_eager(model: Net) -> tuple[Any, Net]:
    module: Any = sp_compiler.compile(copy.deepcopy(model), tp=1)
    _compare(module, model)
    return module, model


def _compare(module: Any, model: Net) -> None:
    for one in (module, model):
        one.zero_grad()
        one(batch()).backward()
    torch.testing.assert_close(module(batch()), model(batch()), rtol=1e-12, atol=0)
    assert_same_gradients(module, model)


@pytest.mark.parametrize(
    "ask",
    [
        lambda net, layer: layer is not net.layers[-1],
        lambda net, layer: layer in (net.layers[0], net.layers[1]),
        lambda net, layer: type(layer) is Layer and layer.act is net.layers[0].act,
    ],
    ids=["identity", "equality", "class"],
)
def test_which_layer_it_is(ask: Callable[[Any, Any], bool]) -> None:
    model = Net(ask, lambda net: net.layers).double()
    assert any(ask(model, layer) for layer in model.layers)
    _assert_like_eager(model)


@pytest.mark.parametrize(
    ("order", "paths"),
    [
        (lambda net: net.layers[1:], ["layers.1", "layers.2"]),
        (lambda net: net.layers[::-1][:2], ["layers.2", "layers.1"]),
        (lambda net: [net.layers[1:][0], net.tail[1:]], ["layers.1", "tail.1", "tail.2"]),
    ],
    ids=["list", "turned", "sequential"],
)
def test_slices_of_layers(order: Callable[[Any], Iterable[Any]], paths: list[str]) -> None:
    module, _ = _assert_like_eager(Net(_never, order).double())
    assert [call.path for call in module.plan.calls if call.path] == paths


def test_an_attribute_that_is_set_later() -> None:
    module, model = _assert_like_eager(Net(_never, lambda net: net.layers).double())
    for one in (module, model):
        one.layers[1].scale = 3.0
    _compare(module, model)
