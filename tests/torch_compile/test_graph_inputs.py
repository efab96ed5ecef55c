"""``torch.compile(model, backend="sp_compiler")``: what graphs read of their inputs, and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch.utils.checkpoint import checkpoint

from sp_compiler.base.errors import CaptureError, UnsupportedError
from tests.helpers.dynamo import HIDDEN, Block, compiled_by_dynamo

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Calling(nn.Module):
    """A block and a buffer, and a function that is its forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(0.0).double()
        self.register_buffer("table", torch.zeros(2, HIDDEN, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.function(self, x, lengths)


def _prefix(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    longest = lengths.max().item()
    torch._check(longest <= x.shape[1])
    return model.block(x[:, :longest]) * lengths.sum().item()


def _chosen(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return model.block(x[torch.arange(x.shape[1]) < lengths[:, None]])


@pytest.mark.parametrize("function", [_prefix, _chosen])
def test_numbers_that_dynamo_leaves_to_a_graph_are_read_in_every_call(
    function: Callable[..., Any],
) -> None:
    """The program of the first call's numbers computed all later ones."""
    compiled, model = compiled_by_dynamo(_Calling(function)), _Calling(function)
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for lengths in ([2, 1], [4, 3], [1, 2]):
            actual = compiled(x, torch.tensor(lengths))
            torch.testing.assert_close(actual, model(x, torch.tensor(lengths)), rtol=0, atol=1e-12)
    actual.sum().backward()
    model(x, torch.tensor(lengths)).sum().backward()
    for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def _writes(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    lengths.add_(1)
    return model.block(x)


def _writes_what_shares(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    row = model.table[0]
    torch._dynamo.graph_break()
    row.add_(1)
    return model.block(x) + model.table.sum()


def _differentiates(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.func.grad(lambda y: model.block(y).sum())(x)


def _branches(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (model.block(x),))
    return result


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_writes, UnsupportedError, r"writes into its input L\['lengths'\]; only buffers"),
        (_writes_what_shares, CaptureError, r"shares memory(?s:.*)clone\(\)"),
        (_differentiates, UnsupportedError, r"torch\.func.*test_graph_inputs\.py:\d+ return"),
        (_branches, CaptureError, r"cond calls functions(?s:.*)torch\.where"),
    ],
)
def test_refusals_name_what_the_model_does(
    function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    compiled = compiled_by_dynamo(_Calling(function))
    x, lengths = torch.randn(2, 4, HIDDEN, dtype=torch.float64), torch.tensor([2, 4])
    with pytest.raises(error, match=message):
        compiled(x, lengths)
    # Nothing of it stays switched off in this process: hooks on saved tensors, say.
    leaf = torch.ones(2, requires_grad=True)
    checkpoint(torch.exp, leaf, use_reentrant=False).sum().backward()
    assert leaf.grad is not None


class _LooksIntoItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(0.0).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self.__dict__:
            self.scale = 2.0
        self.calls += 1
        result: Tensor = self.block(x) * self.scale + self.calls
        return result


def test_a_forward_that_reads_its_dict() -> None:
    """Dynamo names parameters and buffers as entries of it."""
    compiled, model = compiled_by_dynamo(_LooksIntoItself()), _LooksIntoItself()
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    assert compiled.calls == model.calls == 2
