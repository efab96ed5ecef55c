"""Placements of stored parameters next to those of FSDP2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sp_compiler.base.placement import R, S
from sp_compiler.module.parameters import _beside


@pytest.mark.parametrize(
    ("placement", "is_strided"), [(S(0), True), (S(1), False), (S(0, (4, 4)), False), (R, False)]
)
def test_chunks_of_the_dim_that_tp_shards_are_strided(placement: Any, is_strided: bool) -> None:
    """FSDP2's chunks of dim 0 are parts of the full tensor if ``tp`` shards another dim."""
    group = cast(Any, SimpleNamespace(world_size=2))
    expected = _StridedShard(0, split_factor=2) if is_strided else Shard(0)
    assert _beside(Shard(0), placement, group) == expected
