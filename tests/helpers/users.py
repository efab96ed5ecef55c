"""Small models that the tests of ordinary use compile in a fraction of a second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler

WIDTH = 8


class Block(nn.Module):
    """A pre-norm residual perceptron with dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks and a head; returns a dict of the loss, the prediction and its mean per row."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(p), Block(p)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, x: Tensor, target: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        y = self.head(x) * scale
        loss = y.square().mean() if target is None else (y - target).square().mean()
        return {"loss": loss, "y": y, "rows": y.mean(-1)}


def net(p: float = 0.0, dtype: torch.dtype = torch.float64) -> Net:
    """A :class:`Net` that is the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net(p).to(dtype)


def batch(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Random inputs of a :class:`Net`, ``(*shape, WIDTH)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*(shape or (4, 6)), WIDTH), dtype=dtype, generator=generator)


def compiled(build: Callable[[], nn.Module] = net, **options: Any) -> Any:
    """The model compiled for one rank."""
    return sp_compiler.compile(build(), **{"tp": 1, **options})


@functools.cache
def _prepared(p: float) -> Any:
    return compiled(lambda: net(p), example_inputs=((batch(),), {}))


def prepared(p: float = 0.0) -> Any:
    """A fresh :func:`net` that is compiled for :func:`batch` already (once for all tests)."""
    return copy.deepcopy(_prepared(p))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name to gradient of every parameter that has one."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(first: nn.Module, second: nn.Module, rtol: float = 1e-10) -> None:
    """Both models have gradients for the same parameters, equal to rounding."""
    torch.testing.assert_close(gradients(first), gradients(second), rtol=rtol, atol=rtol)


def num_compiled(module: Any) -> int:
    """Return the number of programs that the module keeps."""
    return len(module._sp_state.programs)
