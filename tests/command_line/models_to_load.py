"""Models that a command is given by name."""

from __future__ import annotations

import os
import sys
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


def with_a_tensor() -> Any:
    return nn.Linear(8, 8), torch.zeros(2, 8)


def bare_inputs() -> Any:
    """A model with inputs that are no (args, kwargs)."""
    return Mlp(nn.ReLU()), torch.randn(4, 8)


instance = nn.Linear(2, 2)


def number() -> int:
    """No model."""
    return 3


def broken() -> nn.Module:
    """Raises, as code of a user may."""
    raise RuntimeError("no such weights")


def too_wide() -> Any:
    """Inputs that do not fit the weights."""
    return Mlp(nn.ReLU()), ((torch.randn(4, 9),), {})


def of_a_width(width: int) -> nn.Module:
    """Needs an argument."""
    return nn.Linear(width, width)


class _Branching(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else x.mean()


def data_dependent() -> Any:
    """A model that cannot be captured."""
    return _Branching(nn.ReLU()), ((torch.randn(4, 8),), {})


class _Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def constant() -> Any:
    """A model without parameters."""
    return _Constant(), ((torch.randn(4, 8),), {})


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(nn.ReLU())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.mlp(x)
        return y * 2 if mask.any() else y


def masked() -> Any:
    """Branches on numbers of an input that has none."""
    return _Masked(), ((torch.randn(4, 8), torch.zeros(4, dtype=torch.bool)), {})


def masked_with_numbers() -> Any:
    """The same with an input that has them."""
    mask = torch.zeros(4, dtype=torch.bool, device="cpu")
    return _Masked(), ((torch.randn(4, 8), mask), {})


def ending() -> Any:
    """A script's main function."""
    sys.exit(0)


def printing() -> Any:
    """A model that writes, and so does a library below it."""
    print("built")
    os.write(1, b"from C")
    return relu()
