"""Outputs that are sharded over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import sp_compiler
from sp_compiler.module.outputs import ShardedOutput


@pytest.fixture
def logits(mesh: DeviceMesh) -> DTensor:
    value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(1)])
    value.__class__ = ShardedOutput
    return value


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


class _WithScale(nn.Module):
    """Returns a parameter beside its result, as a model with a learned temperature may."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(self.up(x)) * self.scale, self.scale


def test_a_replicated_parameter_that_is_returned_is_a_plain_tensor(mesh: DeviceMesh) -> None:
    """As all other outputs that are replicated: it meets them in a loss."""
    module = sp_compiler.compile(_WithScale(), mesh=mesh)
    result, scale = module(torch.randn(2, 4, 8))
    assert type(result) is type(scale) is Tensor
    assert scale.requires_grad
    assert torch.equal(scale, torch.arange(8.0))
