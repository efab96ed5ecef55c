"""Calls of a module over several ranks, of which this process plays the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sp_compiler
from sp_compiler import ArgumentError
from tests.helpers import users


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def test_an_empty_batch_cannot_decide_how_parameters_are_sharded(mesh: DeviceMesh) -> None:
    module = sp_compiler.compile(users.net(), mesh=mesh)
    with pytest.raises(ArgumentError, match=r"x has shape \(2, 0, 8\).*the first call decides"):
        module(users.batch(2, 0))
