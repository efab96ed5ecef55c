"""Padded shards of parameters: stored as their true elements, with room behind for the padding.

A rank's DTensor part is the true chunk, so optimizers, norms and checkpoints see what the model
has. It is a view of a storage that has the padding too, zeros that nobody writes to, so a region
reads the padded shard without a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_compiler.layout import local_part
from sp_compiler.placement import Placement


def stored_part(full: Tensor, placement: Placement, rank: int, world: int) -> Tensor:
    """What ``rank`` stores of ``full``: its part without padding."""
    return without_rank_padding(local_part(full, placement, rank, world), placement, rank, world)


def without_rank_padding(part: Tensor, placement: Placement, rank: int, world: int) -> Tensor:
    """The true elements of one rank's padded part, a view."""
    if not placement.padding(world):
        return part
    size = part.shape[placement.dim]
    true = min(max(placement.segments[0] - rank * size, 0), size)
    return part.narrow(placement.dim, 0, true)


def with_room(chunk: Tensor, placement: Placement, world: int) -> Tensor:
    """A copy of a rank's true ``chunk`` in a storage that has the padding too."""
    if not placement.padding(world):
        return chunk
    size, true = _padded_size(placement, world), chunk.shape[placement.dim]
    return _enlarged(chunk, placement.dim, size).narrow(placement.dim, 0, true)


def padded_part(chunk: Tensor, placement: Placement, world: int) -> Tensor:
    """A rank's ``chunk`` with its padding: a view where the storage has it, else a copy."""
    dim, size = placement.dim, _padded_size(placement, world)
    if chunk.shape[dim] == size:
        return chunk
    shape = [*chunk.shape[:dim], size, *chunk.shape[dim + 1 :]]
    stride = [math.prod(shape[position + 1 :]) for position in range(len(shape))]
    has_room = chunk.untyped_storage().nbytes() == math.prod(shape) * chunk.element_size()
    if has_room and not chunk.storage_offset() and list(chunk.stride()) == stride:
        return torch.as_strided(chunk, shape, stride)
    return _enlarged(chunk, dim, size)


def _padded_size(placement: Placement, world: int) -> int:
    return (placement.segments[0] + placement.padding(world)) // world


def _enlarged(chunk: Tensor, dim: int, size: int) -> Tensor:
    shape = [*chunk.shape[:dim], size, *chunk.shape[dim + 1 :]]
    result = chunk.new_zeros(shape)
    result.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
    return result
