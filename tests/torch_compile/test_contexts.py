"""``torch.compile(model, backend="sp_compiler")``: contexts that the forward itself enters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sp_compiler.torch_compile.dynamo_graph import _InliningInterpreter
from tests.helpers.dynamo import compiled_by_dynamo

WIDTH = 8
LABELS = torch.arange(8) % WIDTH
Forward = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Model(nn.Module):
    """A function of an encoder's and a head's linear layers."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _of_both(function: Forward) -> tuple[Tensor, Tensor, nn.Module, nn.Module]:
    """Results of the compiled model and of eager code, and the models, after a backward."""
    model = _Model(function)
    eager = copy.deepcopy(model)
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    found, expected = compiled_by_dynamo(model)(x), eager(x)
    for each in (found, expected):
        each.float().square().mean().backward()
    return found, expected, model, eager


# name: what runs under autocast, which casts inside of all of these operators.
_CAST: dict[str, Forward] = {
    "linear": lambda m, x: m.encoder(x),
    "einsum": lambda m, x: torch.einsum("bsd,ed->bse", x, m.encoder.weight),
    "tensordot": lambda m, x: torch.tensordot(x, m.encoder.weight, dims=([2], [1])),
    "inner": lambda m, x: torch.inner(x, m.encoder.weight),
    "products": lambda m, x: torch.linalg.multi_dot([x[0], m.encoder.weight, m.encoder.weight]),
    "loss": lambda m, x: F.nll_loss(m.encoder(x).flatten(0, 1).log_softmax(-1), LABELS),
}


def _assert_close_in_bfloat16(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("name", _CAST)
def test_autocast_inside(name: str) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _CAST[name](model, x)

    found, expected, model, eager = _of_both(forward)
    _assert_close_in_bfloat16(found, expected)
    for actual, true in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, true.grad, rtol=5e-2, atol=5e-3)
    assert not torch.is_autocast_enabled("cpu")


def test_the_result_of_autocast_is_cast_back() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.encoder(x)
        return model.head(y.float())

    found, expected, *_ = _of_both(forward)
    _assert_close_in_bfloat16(found, expected)
    assert not torch.equal(found, found.bfloat16().float())  # the head is in float32


def test_inference_mode_inside() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = model.encoder(x)
        return model.head(y.clone())

    found, expected, model, eager = _of_both(forward)
    torch.testing.assert_close(found, expected)
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
    assert [p.grad is None for p in eager.parameters()] == [True, True, False, False]


def test_an_error_leaves_autocast() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.amp._enter_autocast, ("cpu", torch.bfloat16, True, None))
    graph.output(graph.call_function(torch.reshape, (x, [7])))
    with pytest.raises(RuntimeError, match="invalid for input of size 3"):
        _InliningInterpreter(fx.GraphModule(nn.Module(), graph)).run(torch.ones(3))
    assert not torch.is_autocast_enabled("cpu")


def test_a_product_that_is_added_with_a_factor() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        y = model.encoder(x)
        return y.addcmul_(x, model.head.weight[0], value=0.3)

    found, expected, *_ = _of_both(forward)
    torch.testing.assert_close(found, expected)
