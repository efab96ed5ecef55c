"""A model whose activations outweigh its parameters, and options that send them to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.api import compile as compile_model
from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.cost.hardware import H100, Link

# A device on which a layer of a few kB takes as long as its copies do.
HARDWARE = replace(H100, memory_gb_per_s=20.0, host=Link(0.0, 20.0))
OPTIONS: dict[str, Any] = {"recompute": "auto", "offload": True, "hardware": HARDWARE}
_LAYERS = 6


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(_LAYERS))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return _Deep().double()


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 256, 16, dtype=torch.float64, generator=torch.Generator())}


def least_bytes(tp: int, offload: bool) -> int:
    """Return the least budget that does."""
    try:
        plan(model(), ((), inputs()), tp=tp, memory_budget=1, **{**OPTIONS, "offload": offload})
    except ArgumentError as error:
        return int(str(error).partition("the minimum that fits is ")[2].split()[0])
    raise AssertionError("a budget of one byte was met")


def step(device: str, offload: bool) -> dict[str, Tensor]:
    """Return the gradients of a step of one rank within the least budget for it."""
    values = {name: value.to(device) for name, value in inputs().items()}
    options = {**OPTIONS, "offload": offload, "memory_budget": least_bytes(1, offload)}
    compiled = compile_model(model().to(device), tp=1, example_inputs=((), values), **options)
    assert (compiled.plan.host_bytes > 0) == offload
    compiled(**values).backward()
    return {
        name: parameter.grad
        for name, parameter in compiled.named_parameters()
        if parameter.grad is not None
    }
