"""Models that a command is given by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two products with a nonlinearity between."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), act, nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))).square().mean()


def relu() -> Any:
    """A model with inputs."""
    return Mlp(nn.ReLU()), ((torch.randn(4, 8),), {})


def gelu() -> Any:
    """Another version of it."""
    return Mlp(nn.GELU()), ((torch.randn(4, 8),), {})


def without_inputs() -> nn.Module:
    """A model whose inputs cannot be guessed."""
    return Mlp(nn.ReLU())


def number() -> int:
    """No model."""
    return 3


def broken() -> nn.Module:
    """Raises, as code of a user may."""
    raise RuntimeError("no such weights")


class _Branching(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x.mean()


def data_dependent() -> Any:
    """A model that cannot be captured."""
    return _Branching(nn.ReLU()), ((torch.randn(4, 8),), {})
