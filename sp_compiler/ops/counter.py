"""The counter-based generator behind dropout and all other random numbers of a compiled model.

A number is a pure function of a 64-bit seed, the number of the draw in its region (its site) and
the 64-bit position of the element in the *global* tensor, so it is the same when it is recomputed
and for every number of ranks, and different on every shard. The position is split in the row (all
dims but the last) and the column. A row gets a 64-bit key from the finaliser of SplitMix64 (Steele
et al., "Fast splittable pseudorandom number generators", 2014); an element gets 32 bits from its
column and the two halves of the key, by a 32-bit finaliser from Wellons' search for low-bias
integer hashes ("hash-prospector": shifts 16, 15, 15, multipliers 0x21f0aaad and 0xd35a2d97). The
first half of the key enters before the finaliser, the second inside it: otherwise rows whose first
halves differ little would hold the same numbers in another order. The finaliser's last shift would
reach only the low bits; instead its first shift and multiplication are repeated, without which
numbers of one row some thousand columns apart were correlated.

All integers are signed, because torch lacks unsigned arithmetic; sums and products wrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

# Elements per block: two int32 temporaries of this size about fill the L2 cache of one core.
_CPU_BLOCK = 1 << 17
# Elsewhere a block only bounds the temporaries.
_DEVICE_BLOCK = 1 << 24

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_SECOND = 0x94D049BB133111EB - (1 << 64)
_HASH_FIRST = 0x21F0AAAD
_HASH_SECOND = 0xD35A2D97 - (1 << 32)


def call_seed(seed: Tensor, call_index: int | Tensor) -> Tensor:
    """Return the seed of the ``call_index``-th region call of a forward with seed ``seed``; one
    seed for each element of a tensor ``call_index``."""
    return _mix64(_mix64(seed) + call_index)


def call_seeds(seed: Tensor, call_indices: Sequence[int]) -> dict[int, Tensor]:
    """Return :func:`call_seed` of each of ``call_indices``, which are in ascending order.

    All at once: the two dozen kernels of each would keep a GPU's host busy.
    """
    if not call_indices:
        return {}
    first = call_indices[0]
    # Made on the device: copying the indices there would make the host wait.
    numbers = torch.arange(first, call_indices[-1] + 1, device=seed.device)
    seeds = call_seed(seed, numbers).unbind()
    # Copies: one that is saved for backward would keep all of them alive.
    return {index: seeds[index - first].clone() for index in call_indices}


def draw_seed() -> Tensor:
    """Draw a seed (0-dim int64) from torch's default CPU generator."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device="cpu")


class Grid:
    """Keys of the rows and numbers of the columns of a part, as (all other dims, last dim).

    Args:
        shape: shape of one rank's part.
        device: device of the numbers.
        seed: 0-dim int64.
        site: number of this draw among those that share ``seed``; a 0-dim int64 tensor if one
            function is compiled for all of them.
        dim: the sharded dimension; ignored if ``world_size`` is 1.
        world_size: over how many ranks ``dim`` is sharded; 1 for a replicated tensor: every
            rank draws the same numbers.
        rank: this rank; a tensor where ranks are simulated.
        first_row: rows of the global tensor before all of these parts, if it is made in pieces.
        padding: elements of ``dim`` over all ranks that the global tensor does not have; their
            positions are those of other elements.
        first_query: first row of dim -2 in this part, if it holds only some of the rank's.
        num_queries: rows of dim -2 that the rank's tensor has; 0 if the part is all of it.
    """

    def __init__(  # noqa: PLR0913 - those of the operators
        self,
        shape: Sequence[int],
        device: torch.device,
        seed: Tensor,
        site: int | Tensor,
        dim: int,
        world_size: int,
        rank: int | Tensor,
        first_row: int = 0,
        padding: int = 0,
        first_query: int = 0,
        num_queries: int = 0,
    ) -> None:
        sizes = tuple(shape) or (1,)
        dim %= len(sizes)
        self.device = device
        self.shape = _flat(sizes)
        queries = _count(sizes[-2], device) + first_query if num_queries else None
        if num_queries:  # from here on the sizes of the rank's tensor, in which positions count
            sizes = (*sizes[:-2], num_queries, sizes[-1])

        def rows_of(count: int) -> Tensor:
            """The first ``count`` rows of the rank's tensor that are in the part."""
            if queries is None:
                return _count(count, device)
            first = _count(count // num_queries, device) * num_queries
            return (first.unsqueeze(1) + queries).flatten()

        rows, columns = rows_of(prod(sizes[:-1])), _count(sizes[-1], device)
        self.num_columns = sizes[-1]
        if world_size > 1 and dim == len(sizes) - 1:
            self.num_columns *= world_size
            # Positions in the global tensor are hashed: no two ranks draw the same numbers, and
            # each draws what a single rank would draw there.
            columns = columns + rank * sizes[-1]
        elif world_size > 1:
            inner = prod(sizes[dim:-1])
            true = inner * world_size - padding * prod(sizes[dim + 1 : -1])
            outer = _count(prod(sizes[:dim]), device) * true
            part = rows_of(inner) + rank * inner
            rows = (outer.unsqueeze(1) + part).flatten()
        if first_row:
            rows = rows + first_row
        # Site and seed are mixed before they are added: both are small consecutive numbers, whose
        # plain sums would collide (seed 1 at site 2, seed 2 at site 1).
        mixed_site = _mix64(site) if isinstance(site, Tensor) else mix64_number(site)
        key = in_memory(_mix64(in_memory(_mix64(seed)) + mixed_site))
        low, high = _halves(in_memory(_mix64(key + rows * _GOLDEN)))
        self.low, self.high = low.unsqueeze(1), high.unsqueeze(1)
        self.columns, self.column_highs = _halves(columns)

    def hash_all(self) -> Tensor:
        """32 well-mixed bits (int32) for each element, in one go."""
        everything = (slice(None), slice(None))
        return self._hash(everything, None, None)

    def blocks(self) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """The same block by block: the rows and columns, and their bits, valid until the next."""
        num_rows, num_columns = self.shape
        height, width = block_shape(self.shape, self.device)
        # Two for all blocks: allocating new ones would cost more than the hash.
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
        _xor_shift(bits, 15, shifted).bitwise_xor_(self.high[rows])
        if self.num_columns > 1 << 32:
            bits.bitwise_xor_(self.column_highs[columns] * _HASH_SECOND)
        bits.mul_(_HASH_SECOND)
        return _xor_shift(bits, 16, shifted).mul_(_HASH_FIRST)


def bits_of(low: Tensor, high: Tensor, column: Tensor) -> Tensor:
    """Return the 32 bits of an element from the key of its row and its column, less than 2^32.

    The same bits as in :class:`Grid`, for kernels that compute element by element out of place.
    """
    bits = low ^ column
    bits = (bits ^ _shifted(bits, 16)) * _HASH_FIRST
    bits = (bits ^ _shifted(bits, 15) ^ high) * _HASH_SECOND
    return (bits ^ _shifted(bits, 16)) * _HASH_FIRST


def _shifted(x: Tensor, shift: int) -> Tensor:
    return (x >> shift) & ((1 << (32 - shift)) - 1)


def _count(size: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... as 64-bit numbers, also when compiled.

    Inductor treats sums and products of an index as indices too, and on a GPU computes those
    in 32 bits; it treats the result of this as a value.
    """
    numbers = torch.arange(size, device=device)
    return numbers | numbers


def _xor_shift(x: Tensor, shift: int, buffer: Tensor | None) -> Tensor:
    """``x ^= x >>> shift`` on int32 in place; torch's shift repeats the sign, hence the mask."""
    shifted = torch.bitwise_right_shift(x, shift, out=buffer)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of int64."""
    x = x + _GOLDEN
    for shift, factor in ((30, _MIX_FIRST), (27, _MIX_SECOND)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def in_memory(x: Tensor) -> Tensor:
    """Return ``x`` as a view that a compiler cannot fuse through.

    Every ``x ^ x >> n`` reads ``x`` twice. A compiler that inlines the expression of ``x`` in both
    places doubles the code each time, and computes keys of rows for every element.
    """
    return x.as_strided(x.shape, x.stride())


def mix64_number(x: int) -> int:
    """:func:`_mix64` of a Python int, computed without an operator."""
    mask = (1 << 64) - 1
    x = (x + _GOLDEN) & mask
    for shift, factor in ((30, _MIX_FIRST), (27, _MIX_SECOND)):
        x = ((x ^ (x >> shift)) * factor) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of int64 as int32; sign-extended first, so that the cast is exact."""
    return ((x << 32) >> 32).to(torch.int32), (x >> 32).to(torch.int32)


def is_plain(rank: int | Tensor, *tensors: Tensor) -> bool:
    """Return False for simulated ranks and other tensor subclasses, which need ordinary
    operators."""
    plain = (Tensor, torch.nn.Parameter)
    return isinstance(rank, int) and all(type(x) in plain for x in tensors)


def scratch_bytes(shape: Sequence[int], device: torch.device) -> int:
    """Two int32 blocks, and the keys of the rows and the numbers of the columns."""
    return 2 * 4 * prod(block_shape(shape, device)) + 8 * sum(_flat(shape))


def block_shape(shape: Sequence[int], device: torch.device) -> tuple[int, int]:
    """Rows and columns of the largest block of a part of this shape."""
    num_rows, num_columns = _flat(shape)
    size = _CPU_BLOCK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_BLOCK
    width = min(size, num_columns)
    return min(max(1, size // max(1, width)), num_rows), width


def _flat(shape: Sequence[int]) -> tuple[int, int]:
    """All dims but the last as one, and the last; a scalar is a row of one."""
    *leading, last = tuple(shape) or (1,)
    return prod(leading), last
