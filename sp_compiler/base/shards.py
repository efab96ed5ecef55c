"""Split tensors into the parts of ranks, and join them again, by placement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.base.placement import Placement


def local_part(full: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """Copy the part of ``full`` that ``rank`` holds, including padding.

    Raises:
        ValueError: a dim or a segment is not divisible by ``world_size``.
    """
    if placement.kind in ("R", "I"):
        return full.clone()
    if placement.kind == "P":
        # Any summands would do; with these the sum is bitwise equal to ``full``.
        return full.clone() if rank == 0 else torch.zeros_like(full)
    dim = placement.dim
    # Only for its error: ``chunk`` would silently make parts of different sizes.
    placement.local_shape(tuple(full.shape), world_size)
    full = padded(full, placement, world_size)
    segments = placement.padded_segments(world_size) or (full.shape[dim],)
    # Copies: a view would keep all of ``full`` alive on every rank.
    parts = [part.chunk(world_size, dim)[rank] for part in full.split(segments, dim)]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()


def join_parts(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Invert :func:`local_part` over all ranks; replicated parts must be equal.

    Raises:
        RankMismatchError: parts that must be equal on all ranks differ.
    """
    if placement.kind == "P":
        return torch.stack(list(parts)).sum(0)
    if placement.kind in ("R", "I"):
        for rank, part in enumerate(parts):
            _check_equal(parts[0], part, rank)
        return parts[0].clone()
    dim = placement.dim
    if len(placement.segments) < 2:
        return without_padding(torch.cat(list(parts), dim), placement, len(parts))
    # A rank holds its part of every segment, so that segments are the outer loop.
    sizes = [size // len(parts) for size in placement.padded_segments(len(parts))]
    pieces = [part.split(sizes, dim) for part in parts]
    full = torch.cat([piece[index] for index in range(len(sizes)) for piece in pieces], dim)
    return without_padding(full, placement, len(parts))


def padded(full: Tensor, placement: Placement, world_size: int) -> Tensor:
    """Return ``full``, with zeros appended to each segment that ``placement`` pads."""
    if not placement.padding(world_size):
        return full
    dim = placement.dim
    sizes = placement.padded_segments(world_size)
    parts = [
        enlarged(part, dim, size)
        for part, size in zip(full.split(placement.segments, dim), sizes, strict=True)
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def enlarged(x: Tensor, dim: int, size: int) -> Tensor:
    """Copy ``x`` with zeros appended to ``dim``, up to ``size``."""
    result = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    result.narrow(dim, 0, x.shape[dim]).copy_(x)
    return result


def without_padding(full: Tensor, placement: Placement, world_size: int) -> Tensor:
    """Invert :func:`padded`; the result is a view if there is a single segment."""
    if not placement.padding(world_size):
        return full
    return first_of_each(
        full, placement.dim, placement.padded_segments(world_size), placement.segments
    )


def first_of_each(x: Tensor, dim: int, sizes: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Return the first ``kept[i]`` elements of each part ``i`` of ``dim``; parts have ``sizes``."""
    parts = first_pieces(x, dim, sizes, kept)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def first_pieces(x: Tensor, dim: int, sizes: Sequence[int], kept: Sequence[int]) -> list[Tensor]:
    """Return the parts of :func:`first_of_each`, as views."""
    return [
        part.narrow(dim, 0, count) for part, count in zip(x.split(sizes, dim), kept, strict=True)
    ]


def _check_equal(first: Tensor, other: Tensor, rank: int) -> None:
    if first.shape != other.shape:
        raise RankMismatchError(
            f"a replicated value is {tuple(first.shape)} on rank 0 but {tuple(other.shape)} on "
            f"rank {rank}"
        )
    if not torch.equal(first, other):
        # NaN at the same positions is not a difference between ranks. Comparisons of values report
        # NaN; a missing conversion must not be blamed for it.
        if ((first == other) | (first.isnan() & other.isnan())).all():
            return
        # Not in their own dtype: bools cannot be subtracted, and unsigned integers wrap.
        wide = torch.complex128 if first.is_complex() else torch.float64
        spread = (first.to(wide) - other.to(wide)).abs().max().item()
        raise RankMismatchError(
            f"a replicated value differs between rank 0 and rank {rank} by up to {spread:g}; "
            "a conversion is missing or wrong"
        )
