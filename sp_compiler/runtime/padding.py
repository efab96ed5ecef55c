"""Padded shards of parameters: stored as the true elements, followed by memory for the padding.

A rank's DTensor part is the true chunk, contiguous, so optimizers, norms and checkpoints see the
model's values. If the outermost dim is padded and has a single segment, the chunk is a view of a
storage that includes the padding, zeros that are never written, so a region reads the padded shard
without a copy.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.base.placement import Placement
from sp_compiler.base.shards import enlarged, first_of_each, local_part


def stored_part(full: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """Return the part of ``full`` that ``rank`` stores, without padding."""
    part = local_part(full, placement, rank, world_size)
    return without_rank_padding(part, placement, rank, world_size).contiguous()


def without_rank_padding(part: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """Return the true elements of one rank's padded part, a view if there is a single segment."""
    if not placement.padding(world_size):
        return part
    sizes = [size // world_size for size in placement.padded_segments(world_size)]
    return first_of_each(part, placement.dim, sizes, placement.true_parts(rank, world_size))


def stored_shape(
    shape: tuple[int, ...], placement: Placement, rank: int, world_size: int
) -> tuple[int, ...]:
    """Return the shape of the part that ``rank`` stores of a tensor of ``shape``."""
    if not placement.padding(world_size):
        return placement.local_shape(shape, world_size)
    size = sum(placement.true_parts(rank, world_size))
    return (*shape[: placement.dim], size, *shape[placement.dim + 1 :])


@torch.no_grad()
def make_room(parameter: DTensor, placement: Placement, world_size: int) -> None:
    """Restore the memory for padding of a parameter whose local part was replaced."""
    local = parameter._local_tensor
    if (
        placement.padding(world_size)
        and _may_have_room(placement)
        and not _has_room(local, placement, world_size)
    ):
        padded = enlarged(local, 0, _padded_shape(local, placement, world_size)[0])
        parameter._local_tensor = padded.narrow(0, 0, local.shape[0])


def padded_part(chunk: Tensor, placement: Placement, world_size: int) -> Tensor:
    """Return a rank's ``chunk`` with its padding: a view if the storage includes it, else a
    copy."""
    shape = _padded_shape(chunk, placement, world_size)
    if tuple(chunk.shape) == shape:
        return chunk
    # Used in every forward and backward: an embedding of a padded vocabulary is too large to copy.
    if _has_room(chunk, placement, world_size):
        strides = [math.prod(shape[position + 1 :]) for position in range(len(shape))]
        return torch.as_strided(chunk, shape, strides)
    # All segments have the same number of units, so the chunk splits like the padded one.
    dim = placement.dim
    parts = [
        enlarged(piece, dim, size // world_size)
        for piece, size in zip(
            chunk.split(_parts_of(chunk, placement), dim),
            placement.padded_segments(world_size),
            strict=True,
        )
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _parts_of(chunk: Tensor, placement: Placement) -> list[int]:
    """Return the number of elements of each segment in a rank's chunk without padding."""
    share = Fraction(chunk.shape[placement.dim], sum(placement.segments))
    return [int(segment * share) for segment in placement.segments]


def _may_have_room(placement: Placement) -> bool:
    return not placement.dim and len(placement.segments) == 1


def _has_room(chunk: Tensor, placement: Placement, world_size: int) -> bool:
    size = math.prod(_padded_shape(chunk, placement, world_size)) * chunk.element_size()
    fits = chunk.untyped_storage().nbytes() == size and not chunk.storage_offset()
    return fits and _may_have_room(placement) and chunk.is_contiguous()


def _padded_shape(chunk: Tensor, placement: Placement, world_size: int) -> tuple[int, ...]:
    dim = placement.dim
    full = (*chunk.shape[:dim], sum(placement.segments), *chunk.shape[dim + 1 :])
    return placement.local_shape(full, world_size)
