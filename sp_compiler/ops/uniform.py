"""Uniform random numbers, from which normalize builds all other distributions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sp_compiler.base.placement import R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.counter import Grid, block_shape, is_plain, scratch_bytes
from sp_compiler.ops.registry import Arguments, Operator, Typing, register

_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a type that one hash of 32 bits fills."""


@torch.no_grad()
def uniform(
    tp: Communicator,
    seed: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    site: int,
    dim: int,
    world_size: int,
) -> Tensor:
    """Draw numbers between 0 and 1, both exclusive, on the device of ``seed``.

    They are the odd multiples of 2^-d, d being the digits of ``dtype``: exact, so that none is
    rounded to 1; never 0, so that a logarithm is finite; and symmetric about 0.5.

    Args:
        tp: communicator of this rank.
        seed: 0-dim int64.
        size: shape of one rank's part of a tensor that is sharded on ``dim`` over ``world_size``
            ranks; if that is 1, the tensor is replicated, and every rank draws the same numbers.
        dtype: a floating type.
        site: number of this draw among those that share ``seed``.
        dim: the sharded dimension; ignored if ``world_size`` is 1.
    """
    # A double takes two hashes; no other draw has a negative site.
    sites = (site, -1 - site) if dtype == torch.float64 else (site,)
    grids = [Grid(size, seed.device, seed, each, dim, world_size, tp.rank) for each in sites]
    if not is_plain(tp.rank, seed):
        return _fraction([grid.hash_all() for grid in grids], dtype).view(list(size))
    result = torch.empty(list(size), dtype=dtype, device=seed.device)
    flat = result.view(grids[0].shape)
    for parts in zip(*[grid.blocks() for grid in grids], strict=True):
        flat[parts[0][0]] = _fraction([bits for _, bits in parts], dtype)
    return result


def _fraction(bits: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Interpret the first digits of hashes as a binary fraction whose last digit is set to 1."""
    if dtype == torch.float64:
        # 26 + 27 = 53 digits, all that a double has below 1; the last is set to 1.
        high, low = (
            _first_digits(each, count).long() for each, count in zip(bits, (26, 27), strict=True)
        )
        return ((high << 27) | low | 1).to(dtype) * 2.0**-53
    digits = _DIGITS[dtype]
    # The first digits, because the generator mixes its last ones less.
    return (_first_digits(bits[0], digits) | 1).to(dtype) * 2.0**-digits


def _first_digits(bits: Tensor, count: int) -> Tensor:
    """The first ``count`` of 32 bits as an int; torch's shift repeats the sign, hence the mask."""
    return (bits >> (32 - count)) & ((1 << count) - 1)


def _fake(seed: Tensor, size: Sequence[int], dtype: torch.dtype, *rest: int) -> Tensor:
    return seed.new_empty(list(size), dtype=dtype)


def _typings(args: Arguments, world_size: int) -> Sequence[Typing]:
    # Either every rank draws all of it, or each its part; a part of another group's draw is
    # neither.
    typings: list[Typing] = []
    if args["world_size"] == 1:
        typings.append(((R,), (R,)))
    if args["world_size"] == world_size:
        typings.append(((R,), (S(args["dim"] % max(1, len(args["size"]))),)))
    return typings


def _scratch_bytes(args: Arguments, result: Tensor) -> int:
    block = prod(block_shape(result.shape, result.device))
    drawn = scratch_bytes(result.shape, result.device)
    # Four temporaries of a block exist at once for 64-bit fractions; else two of 32 bits.
    return 2 * drawn + 32 * block if args["dtype"] == torch.float64 else drawn + 8 * block


UNIFORM = register(
    Operator(
        name="uniform",
        schema="(Tensor seed, SymInt[] size, ScalarType dtype, SymInt site, SymInt dim, "
        "SymInt world_size) -> Tensor",
        kernel=uniform,
        fake=_fake,
        typings=_typings,
        placed=True,
        scratch_bytes=_scratch_bytes,
    )
)
