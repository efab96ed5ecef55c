"""Counter-based dropout: which elements survive is a pure function of what and where they are.

The mask depends on a 64-bit seed, the number of the dropout in its region and the 64-bit position
of the element in the *global* tensor, so it is the same when it is recomputed and for every number
of ranks, and different on every shard. The position is split in the row (all dims but the last) and
the column. A row gets a 64-bit key from the finaliser of SplitMix64 (Steele et al., "Fast
splittable pseudorandom number generators", 2014); an element gets 32 bits from its column and the
two halves of the key, by two rounds of a 32-bit finaliser from Wellons' search for low-bias integer
hashes ("hash-prospector": shifts 16, 15, 15, multipliers 0x21f0aaad and 0xd35a2d97).

Integers are signed throughout, for want of unsigned arithmetic in torch; sums and products wrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Arguments, Gradient, Operator, Typing, register

_sp = torch.ops.sp_compiler

# Elements per block: two int32 temporaries of this size about fill the L2 cache of one core.
_CPU_BLOCK = 1 << 17
# Elsewhere a block only bounds the temporaries.
_DEVICE_BLOCK = 1 << 24

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_SECOND = 0x94D049BB133111EB - (1 << 64)
_HASH_FIRST = 0x21F0AAAD
_HASH_SECOND = 0xD35A2D97 - (1 << 32)


@torch.no_grad()
def dropout_mask(
    tp: Communicator, x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int
) -> Tensor:
    """Bool mask, shaped and laid out like ``x``: True where the element survives.

    Args:
        tp: whose rank it is.
        x: one rank's part of a tensor that is sharded on ``dim`` over ``world_size`` ranks; 1 for a
            replicated one, of which every rank drops the same elements.
        seed: 0-dim int64.
        p: probability of dropping an element, in [0, 1), met to 2^-32.
        site: number of this dropout among those that share ``seed``.
        dim: the sharded dimension; of no meaning where ``world_size`` is 1.

    Raises:
        ArgumentError: ``p`` is outside [0, 1).
    """
    mask = torch.empty_like(x, dtype=torch.bool)
    grid = _Grid(x, seed, site, dim, world_size, tp.rank)
    threshold = _threshold(p)
    if not _is_plain(x, seed, tp.rank):
        return mask.copy_((grid.hash_all() >= threshold).view(x.shape))
    target = (
        mask if mask.is_contiguous() else torch.empty(x.shape, dtype=torch.bool, device=x.device)
    )
    flat = target.view(grid.shape)
    for block, bits in grid.blocks():
        torch.ge(bits, threshold, out=flat[block])
    return mask if target is mask else mask.copy_(target)


@torch.no_grad()
def dropout(
    tp: Communicator, x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int
) -> Tensor:
    """``x * dropout_mask(x, ...) * (1 / (1 - p))``, bit for bit, with no mask in memory.

    Arguments as of :func:`dropout_mask`. It is linear in ``x`` and its own gradient.
    """
    result = torch.empty_like(x)
    grid = _Grid(x, seed, site, dim, world_size, tp.rank)
    threshold, scale = _threshold(p), 1 / (1 - p)
    if not _is_plain(x, seed, tp.rank):
        survives = (grid.hash_all() >= threshold).view(x.shape)
        return result.copy_((x * survives).mul_(scale))
    source = x.contiguous()
    target = result if result.is_contiguous() else torch.empty_like(source)
    source_rows, target_rows = source.view(grid.shape), target.view(grid.shape)
    for block, bits in grid.blocks():
        survives = bits.ge_(threshold)
        torch.mul(source_rows[block], survives.to(x.dtype), out=target_rows[block]).mul_(scale)
    return result if target is result else result.copy_(target)


def call_seed(seed: Tensor, call_index: int) -> Tensor:
    """The seed of the ``call_index``-th region call of a forward whose seed is ``seed``."""
    return _mix64(_mix64(seed) + call_index)


def draw_seed() -> Tensor:
    """A seed (0-dim int64) drawn from torch's default CPU generator."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device="cpu")


class _Grid:
    """Keys of the rows and numbers of the columns of ``x`` as (all other dims, last dim)."""

    def __init__(
        self, x: Tensor, seed: Tensor, site: int, dim: int, world_size: int, rank: int | Tensor
    ) -> None:
        sizes = tuple(x.shape) or (1,)
        dim %= len(sizes)
        self.device = x.device
        self.shape = (prod(sizes[:-1]), sizes[-1])
        rows, columns = (torch.arange(size, device=x.device) for size in self.shape)
        self.num_columns = sizes[-1]
        if world_size > 1 and dim == len(sizes) - 1:
            self.num_columns *= world_size
            columns = columns + rank * sizes[-1]
        elif world_size > 1:
            inner = prod(sizes[dim:-1])
            outer = torch.arange(prod(sizes[:dim]), device=x.device) * (inner * world_size)
            part = torch.arange(inner, device=x.device) + rank * inner
            rows = (outer.unsqueeze(1) + part).flatten()
        key = _mix64(_mix64(seed) + _mix64(torch.full_like(seed, site)))
        low, high = _halves(_mix64(key + rows * _GOLDEN))
        self.low, self.high = low.unsqueeze(1), high.unsqueeze(1)
        self.columns, self.column_highs = _halves(columns)

    def hash_all(self) -> Tensor:
        """32 well-mixed bits (int32) for each element, in one go."""
        everything = (slice(None), slice(None))
        return self._hash(everything, None, None)

    def blocks(self) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """The same block by block: the rows and columns, and their bits, valid until the next."""
        num_rows, num_columns = self.shape
        height, width = _block_shape(self.shape, self.device)
        buffers = torch.empty(2, height * width, dtype=torch.int32, device=self.device)
        for top in range(0, num_rows, max(1, height)):
            for left in range(0, num_columns, max(1, width)):
                bottom, right = min(top + height, num_rows), min(left + width, num_columns)
                shape = (bottom - top, right - left)
                bits, shifted = buffers[:, : prod(shape)].view(2, *shape).unbind()
                block = (slice(top, bottom), slice(left, right))
                yield block, self._hash(block, bits, shifted)

    def _hash(
        self, block: tuple[slice, slice], bits: Tensor | None, shifted: Tensor | None
    ) -> Tensor:
        rows, columns = block
        bits = torch.bitwise_xor(self.low[rows], self.columns[columns], out=bits)
        _xor_shift(bits, 16, shifted).mul_(_HASH_FIRST)
        _xor_shift(bits, 15, shifted).mul_(_HASH_SECOND)
        _xor_shift(bits, 15, shifted)
        bits.bitwise_xor_(self.high[rows])
        if self.num_columns > 1 << 32:
            bits.bitwise_xor_(self.column_highs[columns] * _HASH_SECOND)
        _xor_shift(bits, 16, shifted).mul_(_HASH_FIRST)
        # Without the last shift: it only reaches the low bits, which hardly matter to a comparison.
        return _xor_shift(bits, 15, shifted).mul_(_HASH_SECOND)


def _block_shape(shape: tuple[int, int], device: torch.device) -> tuple[int, int]:
    num_rows, num_columns = shape
    size = _CPU_BLOCK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_BLOCK
    width = min(size, num_columns)
    return min(max(1, size // max(1, width)), num_rows), width


def _xor_shift(x: Tensor, shift: int, buffer: Tensor | None) -> Tensor:
    """``x ^= x >>> shift`` on int32 in place; torch repeats the sign, hence the mask."""
    shifted = torch.bitwise_right_shift(x, shift, out=buffer)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of int64."""
    x = x + _GOLDEN
    for shift, factor in ((30, _MIX_FIRST), (27, _MIX_SECOND)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of int64 as int32; sign-extended first, so that the cast is exact."""
    return ((x << 32) >> 32).to(torch.int32), (x >> 32).to(torch.int32)


def _threshold(p: float) -> int:
    """The least int32 that survives: a share ``p`` of the 2^32 values is below it."""
    if not 0 <= p < 1:
        raise ArgumentError(f"dropout p={p!r}: expected a probability in [0, 1)")
    return min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def _is_plain(x: Tensor, seed: Tensor, rank: int | Tensor) -> bool:
    """False for simulated ranks and other tensor subclasses, which want ordinary operators."""
    plain = (Tensor, torch.nn.Parameter)
    return isinstance(rank, int) and type(x) in plain and type(seed) in plain


# What a graph knows of them.


def _fake_mask(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _fake_like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _save_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return _sp.dropout(grad, seed, *ctx.rest), None, None, None, None, None


def _type_dropout(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Linear, so it passes partial sums on; a shard has to be told where it lies."""
    return _typings(args, world_size, P)


def _type_mask(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Of a partial sum it is that of the sum: it reads no number of ``x``."""
    return _typings(args, world_size, R)


def _typings(args: Arguments, world_size: int, of_partial: Placement) -> Sequence[Typing]:
    typings: list[Typing] = []
    if args["world_size"] == 1:
        typings += [((R, R), (R,)), ((P, R), (of_partial,))]
    if args["world_size"] == world_size:
        shard = S(args["dim"] % max(1, args["x"].meta["val"].dim()))
        typings.append(((shard, R), (shard,)))
    return typings


def _scratch_of_dropout(args: Arguments, result: Tensor) -> int:
    x = args["x"].meta["val"]
    survives = x.element_size() * prod(_block_of(x))
    return _scratch_bytes(x) + survives + (0 if x.is_contiguous() else 2 * x.nbytes)


def _scratch_of_mask(args: Arguments, result: Tensor) -> int:
    x = args["x"].meta["val"]
    return _scratch_bytes(x) + (0 if x.is_contiguous() else x.numel())


def _scratch_bytes(x: Tensor) -> int:
    """Two int32 blocks, and the keys of the rows and the numbers of the columns."""
    sizes = tuple(x.shape) or (1,)
    return 2 * 4 * prod(_block_of(x)) + 8 * (prod(sizes[:-1]) + sizes[-1])


def _block_of(x: Tensor) -> tuple[int, int]:
    sizes = tuple(x.shape) or (1,)
    return _block_shape((prod(sizes[:-1]), sizes[-1]), x.device)


_SCHEMA = "(Tensor x, Tensor seed, float p, SymInt site, SymInt dim, SymInt world_size) -> Tensor"
DROPOUT_MASK = register(
    Operator(
        name="dropout_mask",
        schema=_SCHEMA,
        kernel=dropout_mask,
        fake=_fake_mask,
        typings=_type_mask,
        placed=True,
        scratch_bytes=_scratch_of_mask,
    )
)
DROPOUT = register(
    Operator(
        name="dropout",
        schema=_SCHEMA,
        kernel=dropout,
        fake=_fake_like,
        typings=_type_dropout,
        gradient=Gradient(_save_seed, _backward),
        placed=True,
        scratch_bytes=_scratch_of_dropout,
    )
)
