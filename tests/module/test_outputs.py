"""Outputs that are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_compiler.module.outputs import ShardedOutput


@pytest.fixture
def logits() -> Iterator[DTensor]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(1)])
        value.__class__ = ShardedOutput
        yield value
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "calls"), [(torch.OutOfMemoryError, 1), (RuntimeError, 2), (ValueError, 1)]
)
def test_what_a_single_rank_may_raise_is_not_tried_on_full_tensors(
    logits: DTensor, error: type[Exception], calls: int
) -> None:
    """To gather them is a collective, in which one rank would wait for the others."""
    shapes = []

    def operation(value: Tensor, **_: Any) -> None:
        shapes.append(tuple(value.shape))
        raise error("no")

    with pytest.raises(error):
        ShardedOutput.__torch_function__(operation, (ShardedOutput,), (logits,))
    assert shapes == [(2, 6)] * calls
