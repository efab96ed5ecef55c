"""One row of the list: a model of a package, small, and how to call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class NotSmallError(Exception):
    """No sizes were found with which a model is small and runs."""


@dataclass(frozen=True)
class Entry:
    """Recipe to build and call a model.

    Attributes:
        package: distribution to install.
        name: of the model, unique in its package.
        make: builds it with random weights, 30 million parameters at most; may raise
            :class:`NotSmallError`.
        inputs: arguments of one call.
    """

    package: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def images(size: int, channels: int = 3, batch: int = 2) -> Callable[[], Inputs]:
    """A batch of square images, channels first."""
    return lambda: ((torch.randn(batch, channels, size, size),), {})


def tokens(length: int = 12, vocabulary: int = 64, batch: int = 2) -> Callable[[], Inputs]:
    """Token ids of shape ``(batch, length)``."""
    return lambda: ((torch.randint(0, vocabulary, (batch, length)),), {})


def features(length: int, width: int, batch: int = 2) -> Callable[[], Inputs]:
    """Embedded tokens of shape ``(batch, length, width)``."""
    return lambda: ((torch.randn(batch, length, width),), {})


class Projected(nn.Module):
    """``model`` with a loss that is a weighted sum of all its results, with different weights.

    A plain sum would have a gradient of zero through a softmax or a normalization.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the loss, a scalar."""
        leaves = torch.utils._pytree.tree_leaves(self.model(*args, **kwargs))
        # By type, not by requires_grad, which says nothing while a model is traced.
        parts = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([_weighted(part) for part in parts]).sum()


def _weighted(part: Tensor) -> Tensor:
    weights = torch.linspace(-1.0, 1.0, part.numel(), dtype=part.dtype, device=part.device)
    return (part * weights.reshape(part.shape)).mean()
