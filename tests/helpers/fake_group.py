"""Process groups that this process plays one rank of, and meshes over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default group of ``world_size`` ranks whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_mesh(world_size: int) -> Iterator[DeviceMesh]:
    """A mesh with the axis "tp" over such a group."""
    with fake_group(world_size):
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
