"""A gradient that is infinite on one rank stops the step of all, however the others are sharded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sp_compiler.module.dtensors.overflows import find_overflows_of_all_ranks
from tests.helpers.ranks import run_on_ranks


def _scales() -> dict[str, float]:
    """After a step of which one part of one parameter, on the second rank, had an infinity."""
    find_overflows_of_all_ranks()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    meshes: dict[str, Any] = {"both": (mesh, [Shard(0), Shard(1)]), "tp": (mesh["tp"], [Shard(0)])}
    meshes |= {"data": (mesh, [Shard(0), Replicate()]), "none": (mesh["tp"], [Replicate()])}
    scales = {}
    for order in itertools.permutations(meshes):
        for infinite in ("both", "tp"):
            parameters = {
                name: nn.Parameter(distribute_tensor(torch.ones(4, 4), *meshes[name]))
                for name in order
            }
            for name, parameter in parameters.items():
                assert isinstance(parameter, DTensor)
                part = torch.full_like(parameter.to_local(), 4.0)
                if name == infinite and dist.get_rank() == 1:
                    part[0, 0] = float("inf")
                parameter.grad = DTensor.from_local(part, *meshes[name])
            optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            scales[f"{infinite} of {order}"] = scaler.get_scale()
            for parameter in parameters.values():
                assert parameter.to_local().eq(1).all(), (order, infinite)  # type: ignore[attr-defined]
    return scales


@pytest.mark.slow
def test_all_ranks_skip_the_step() -> None:
    for scales in run_on_ranks(2, _scales):
        assert set(scales.values()) == {2.0}, scales
