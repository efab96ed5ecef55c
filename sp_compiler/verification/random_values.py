"""Random values for parameters that have no values yet."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sp_compiler.ir.fx import carries_gradient
from sp_compiler.verification.precision import widest

Spread = Literal["any sign", "positive", "fraction"]
SPREADS: tuple[Spread, ...] = ("any sign", "positive", "fraction")
"""In the order to try them: roots and logarithms of parameters need the second or the third, and a
comparison of what is not a number on both sides would prove nothing."""


def random_like(
    value: Tensor,
    generator: torch.Generator,
    device: torch.device | None = None,
    spread: Spread = "any sign",
) -> Tensor:
    """Return random float64 numbers, scaled so that matrix products stay of order one.

    ``value`` gives the shape; if its dtype has no gradients, the result is zero.
    """
    shape, device = tuple(value.shape), device or value.device
    if not carries_gradient(value):
        return torch.zeros(shape, dtype=value.dtype, device=device)
    # On the CPU, whatever the device: generators of two devices draw different numbers.
    noise = torch.randn(shape, generator=generator, dtype=widest(value.dtype))
    if spread != "any sign" and not noise.is_complex():
        noise = noise.abs()
    if spread == "fraction" and not noise.is_complex():
        noise = noise / (1 + noise)
    # The fan-in of a weight, at most 64, for narrow results of wide tables would vanish.
    scale = 1 / math.sqrt(min(shape[-1], 64)) if len(shape) == 2 else 1.0
    return (noise * scale).to(device).requires_grad_()
