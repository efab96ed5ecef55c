"""Helpers of DTensor's rules that know strided shards, whichever torch runs here."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from sp_compiler.module.dtensors.strided_rules import _first_replicated, _shifting


def test_dims_in_front_move_strided_shards() -> None:
    """By one where a dim comes at or before theirs; by one back where one before it goes."""
    placements = [_StridedShard(0, split_factor=2), _StridedShard(2, split_factor=3), Shard(1)]

    def shift(given: Sequence[Placement], at: int = 0) -> list[Placement]:
        return list(given)

    assert _shifting(shift, 1)(placements, 2) == [
        _StridedShard(0, split_factor=2),
        _StridedShard(3, split_factor=3),
        Shard(1),
    ]
    assert _shifting(shift, -1)(placements, 1) == [
        _StridedShard(0, split_factor=2),
        _StridedShard(1, split_factor=3),
        Shard(1),
    ]
    # The dim that goes is not behind itself.
    assert _shifting(shift, -1)(placements[:1], 0) == placements[:1]
    assert _shifting(shift, 1)(placements[:1]) == [_StridedShard(1, split_factor=2)]


def test_strided_shards_of_the_dim_are_replicated_first() -> None:
    def unsharded(given: Sequence[Placement], dim: int | list[int]) -> tuple[Placement, ...]:
        return tuple(given)

    placements = (_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=2), Partial())
    wrapped = _first_replicated(unsharded)
    assert wrapped(placements, 1) == (Replicate(), *placements[1:])
    assert wrapped(placements, [0, 1]) == (Replicate(), Replicate(), Partial())
    assert wrapped(placements, 2) == placements
