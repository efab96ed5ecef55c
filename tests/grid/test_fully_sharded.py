"""What ``FullySharded`` says of parameters that FSDP2 does not manage; one rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sp_compiler
from tests.helpers.users import batch, net


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _heard(module: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module(batch())["loss"].backward()
    return [str(each.message) for each in caught if "FSDP2 manages" in str(each.message)]


def test_parameters_outside_of_sharded_layers_are_named_once() -> None:
    """Not those that are frozen, nor where the whole module is sharded too."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    alone: Any = sp_compiler.compile(net(), mesh=mesh, example_inputs=((batch(),), {}), fsdp=False)
    frozen, whole = copy.deepcopy(alone), copy.deepcopy(alone)
    frozen.head.requires_grad_(False)
    for module in (alone, frozen, whole):
        for block in module.blocks:
            fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(whole, mesh=mesh["dp_shard"])
    (message,) = _heard(alone)
    assert "but not head.weight, head.bias: their gradients are not reduced" in message
    assert _heard(frozen) == _heard(whole) == []
    # A module without FSDP2, whose parameters nobody manages, and one that is wrapped later on.
    plain: Any = sp_compiler.compile(net(), mesh=mesh, example_inputs=((batch(),), {}), fsdp=False)
    assert _heard(plain) == []
    fully_shard(plain.blocks[0], mesh=mesh["dp_shard"])
    (message,) = _heard(plain)
    names = "but not blocks.1.norm.weight, blocks.1.norm.bias, blocks.1.up.weight and 5 more"
    assert names in message
