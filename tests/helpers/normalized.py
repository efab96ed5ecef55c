"""Functions captured and normalized, as text and as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.ir.captured import Captured
from sp_compiler.ir.text import render
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.reference import run_captured


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def captured_from(function: Callable[..., Any], *args: Tensor) -> Captured:
    return capture(Function(function), args)


class OfWeights(Function):
    """A function of an input and of weights: of numbers that no call knows before."""

    def __init__(self, function: Callable[..., Any], weights: Tensor) -> None:
        super().__init__(function)
        self.weights = nn.Parameter(weights)

    def forward(self, *args: Tensor) -> Any:
        args = (*args, self.weights)
        return self.function(*args)


def normalized(
    function: Callable[..., Any], *args: Tensor, dropout: Any = "regenerate"
) -> Captured:
    captured = captured_from(function, *args)
    normalize(captured, dropout=dropout)
    return captured


def text(captured: Captured) -> str:
    return render(captured.module.graph)


def body(captured: Captured) -> list[str]:
    """The graph's calls and output, without placeholders."""
    return [line for line in text(captured).splitlines() if "placeholder[" not in line]


def outputs(captured: Captured, *args: Tensor, seed: int = 0) -> list[Any]:
    leaves, _ = flatten_inputs(args)
    return run_captured(captured, {}, {}, leaves, torch.tensor(seed)).outputs


def randn(*size: int, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_(grad)
