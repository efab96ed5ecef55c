"""What verify compares beside outputs and gradients, and models that it cannot compare."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_compiler.base.errors import ArgumentError
from sp_compiler.verification.verify import verify
from tests.helpers.slow import slow


class _Averages(nn.Module):
    """Writes one buffer in place and sets another."""

    mean: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("mean", torch.ones(32))
        self.register_buffer("latest", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.mean.mul_(0.75).add_(hidden.detach().mean((0, 1)), alpha=0.25)
        result: Tensor = self.down(hidden)
        self.latest = result.detach().mean((0, 1)) * 0.5
        return result.square().mean()


def _changing(constant: float) -> Callable[[torch.fx.GraphModule], int]:
    def changed(module: torch.fx.GraphModule) -> int:
        (node,) = [node for node in module.graph.nodes if constant in node.args]
        node.args = tuple(0.9 if arg == constant else arg for arg in node.args)
        return 1

    return changed


@pytest.mark.parametrize(("constant", "name"), [(0.75, "mean"), slow(0.5, "latest")])
def test_a_buffer_that_is_written_wrongly(constant: float, name: str) -> None:
    """Neither the loss nor a gradient shows it: it comes out in another step."""
    example: Any = ((torch.randn(2, 4, 8),), {})
    assert verify(_Averages(), example, tp=2).ok
    report = verify(_Averages(), example, tp=2, passes=[_changing(constant)])
    assert report.first_bad_pass == "changed"
    assert f"new value of {name}" in str(report)


_CALLS = itertools.count(1)


class _Counting(nn.Module):
    """Computes with a count that is outside of the model, which no capture sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(_CALLS)


def test_a_model_that_computes_something_else_each_time() -> None:
    """Its noise floor would hide any error."""
    with pytest.raises(
        ArgumentError, match=r"two forwards of the same inputs.* differ by \de[+-]0\d"
    ):
        verify(_Counting(), ((torch.randn(2, 8),), {}), tp=2)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].lock = threading.Lock()
    with pytest.raises(ArgumentError, match=r"its attribute '0\.lock' cannot be copied .TypeError"):
        verify(model, ((torch.randn(2, 8),), {}), tp=2)


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed, self.block = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return (x * y.tanh()).square().sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_model_runs_again_in_backward_has_the_same_parameters(use_reentrant: bool) -> None:
    report = verify(_Checkpointed(use_reentrant), ((torch.arange(6).view(2, 3),), {}), tp=2)
    assert report.ok, report
