"""Padded shards of parameters: stored as the true elements, followed by memory for the padding.

A rank's DTensor part is the true chunk, contiguous, so optimizers, norms and checkpoints see the
model's values. If the outermost dim is padded, the chunk is a view of a storage that includes the
padding, zeros that are never written, so a region reads the padded shard without a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.base.placement import Placement
from sp_compiler.base.shards import enlarged, local_part


def stored_part(full: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """Return the part of ``full`` that ``rank`` stores, without padding."""
    part = local_part(full, placement, rank, world_size)
    return without_rank_padding(part, placement, rank, world_size).contiguous()


def without_rank_padding(part: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """Return a view of the true elements of one rank's padded part."""
    if not placement.padding(world_size):
        return part
    size = part.shape[placement.dim]
    true = min(max(placement.segments[0] - rank * size, 0), size)
    return part.narrow(placement.dim, 0, true)


@torch.no_grad()
def make_room(parameter: DTensor, placement: Placement, world_size: int) -> None:
    """Restore the memory for padding of a parameter whose local part was replaced."""
    local = parameter._local_tensor
    if (
        placement.padding(world_size)
        and not placement.dim
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
    # In every forward and backward: an embedding of a padded vocabulary is too large to copy.
    if _has_room(chunk, placement, world_size):
        strides = [math.prod(shape[position + 1 :]) for position in range(len(shape))]
        return torch.as_strided(chunk, shape, strides)
    return enlarged(chunk, placement.dim, shape[placement.dim])


def _has_room(chunk: Tensor, placement: Placement, world_size: int) -> bool:
    size = math.prod(_padded_shape(chunk, placement, world_size)) * chunk.element_size()
    fits = chunk.untyped_storage().nbytes() == size and not chunk.storage_offset()
    return fits and not placement.dim and chunk.is_contiguous()


def _padded_shape(chunk: Tensor, placement: Placement, world_size: int) -> tuple[int, ...]:
    dim = placement.dim
    full = (*chunk.shape[:dim], placement.segments[0], *chunk.shape[dim + 1 :])
    return placement.local_shape(full, world_size)
