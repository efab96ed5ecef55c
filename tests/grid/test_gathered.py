"""Parameters of FSDP2 that stay gathered while a pipeline runs its microbatches; one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sp_compiler.grid.fully_sharded import FullySharded
from sp_compiler.grid.gathered import GatheredParameters


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _loss(model: nn.Linear, x: Tensor) -> Tensor:
    # As a stage reads them: the module itself is never called.
    return nn.functional.linear(x, model.weight, model.bias).pow(2).sum()


def _step(model: nn.Linear, microbatches: Iterable[Tensor]) -> None:
    with GatheredParameters(model, FullySharded({"": model}, list)).gathered(reduce=True):
        for x in microbatches:
            _loss(model, x).backward()


def test_gradients_of_microbatches_add_up_and_a_failed_step_leaves_none() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(_loss(model, x), list(model.parameters()))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _step(model, [x[:2], x.T])
    assert all(parameter.grad is None for parameter in model.parameters())
    _step(model, x.split(2))
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    torch.testing.assert_close(gradients, list(expected))


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_gradients_that_wait_are_unreduced_in_whatever_dtype(reduce_dtype: torch.dtype) -> None:
    """In another one than they are computed in, FSDP keeps them apart from the parameter."""
    model = nn.Linear(3, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    wrapped.set_requires_gradient_sync(False)
    managed = FullySharded({"": model}, list)
    assert set(managed.parameters(1)) == {"weight", "bias"}
    assert not managed.has_unreduced()
    model(torch.ones(4, 3)).sum().backward()
    assert managed.has_unreduced()
    managed.drop_unreduced()
    assert not managed.has_unreduced()
