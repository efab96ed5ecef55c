"""Segmented parameters, sharded outputs, dropout seeds and meshes of the compiled module."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sp_compiler.errors import ArgumentError, RankMismatchError
from sp_compiler.layout import local_part
from sp_compiler.placement import S
from sp_compiler.runtime.group import tensor_parallel_group
from sp_compiler.runtime.module import DistributedModule
from tests.handmade_fused import FusedModel, handmade_fused
from tests.ranks import run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

_EQUAL, _UNEQUAL = (4, 4, 4), (8, 2, 2)


def _model() -> FusedModel:
    torch.manual_seed(7)
    return FusedModel(12).double()


def _input() -> torch.Tensor:
    return torch.arange(20, dtype=torch.float64).view(5, 4) / 10


def _compiled(segments: tuple[int, ...], p: float = 0.0) -> Any:
    group = tensor_parallel_group(2)
    return DistributedModule(_model(), group, lambda *args: handmade_fused(segments, 2, p))


def _on_ranks() -> dict[str, Any]:
    return {
        "segments": [_segments(_EQUAL), _segments(_UNEQUAL)],
        "output": _output(),
        "dropout": _dropout(),
        "mesh": _mesh(),
        "alone": _alone(),
    }


def _segments(segments: tuple[int, ...]) -> Any:
    """state_dict shows the true weight in true chunks, and loads it back."""
    module, expected = _compiled(segments), _model()
    whole = expected.fused.weight.detach().clone()
    module(_input())[0].backward()
    expected(_input())[0].backward()
    (entry,) = module.state_dict().values()
    assert entry.placements == (Shard(0),)
    assert torch.equal(entry.full_tensor(), whole)
    assert torch.equal(entry.to_local(), whole.chunk(2)[dist.get_rank()])
    parameter = module.fused.weight
    assert parameter.to_local().shape == (6, 4)
    module.load_state_dict({"fused.weight": entry})
    local = parameter.to_local().clone()
    module.load_state_dict({"fused.weight": whole})
    assert torch.equal(parameter.to_local(), local)
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    updated = module.state_dict()["fused.weight"].full_tensor()
    torch.testing.assert_close(updated, expected.fused.weight.detach(), rtol=1e-12, atol=1e-15)
    if len(set(segments)) == 1:
        torch.testing.assert_close(parameter.full_tensor(), updated)
    return True


def _output() -> Any:
    module, expected = _compiled(_EQUAL), _model()
    loss, y = module(_input())
    assert isinstance(y, DTensor)
    assert (y.placements, y.shape) == ((Shard(1),), (5, 12))
    assert not isinstance(loss, DTensor)
    (loss + y.redistribute(placements=[Replicate()]).to_local().sum()).backward()
    loss_0, y_0 = expected(_input())
    (loss_0 + y_0.sum()).backward()
    torch.testing.assert_close(y.full_tensor(), y_0)
    rank, world = dist.get_rank(), dist.get_world_size()
    grad = local_part(expected.fused.weight.grad, S(0, _EQUAL), rank, world)
    torch.testing.assert_close(module.fused.weight.grad.to_local(), grad)
    replicated = DTensor.from_local(_input(), y.device_mesh, [Replicate()])
    torch.testing.assert_close(module(replicated)[0], loss)
    with pytest.raises(ArgumentError, match="whole on every rank"):
        module(DTensor.from_local(_input(), y.device_mesh, [Shard(0)]))
    return True


def _dropout() -> Any:
    """Rank 0's generator decides; the same state gives the same masks."""
    module = _compiled(_EQUAL, p=0.5)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + 100 * dist.get_rank())
        losses.append(module(_input())[0].item())
    return losses


def _alone() -> Any:
    """A rank that calls the module alone raises; the group is of no use afterwards."""
    module = _compiled(_EQUAL)
    module(_input())
    if dist.get_rank() == 0:
        module._sp_calls.timeout = timedelta(seconds=1)
        with pytest.raises(RankMismatchError, match="rank 0 calls the module"):
            module(_input()[:2])
    else:
        time.sleep(3)  # longer than the other rank waits
    return True


def _mesh() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = DistributedModule(
        _model(), tensor_parallel_group(mesh=mesh), lambda *args: handmade_fused(_EQUAL, 2)
    )
    with pytest.raises(ArgumentError, match="tp=4, but the mesh has 2"):
        tensor_parallel_group(4, mesh)
    with pytest.raises(ArgumentError, match='named "tp"'):
        tensor_parallel_group(mesh=mesh["dp"])
    with pytest.raises(ArgumentError, match="default process group has 2 ranks"):
        tensor_parallel_group(4)
    return module(_input())[0].item(), module.fused.weight.device_mesh.mesh_dim_names


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, _on_ranks)


def test_segmented_weights_show_true_values(ranks: list[dict[str, Any]]) -> None:
    assert [result["segments"] for result in ranks] == [[True, True]] * 2


def test_sharded_outputs_are_dtensors(ranks: list[dict[str, Any]]) -> None:
    assert [result["output"] for result in ranks] == [True, True]


def test_dropout_seed_is_rank_0s(ranks: list[dict[str, Any]]) -> None:
    first, second = (result["dropout"] for result in ranks)
    assert first == second
    assert first[0] == first[1] != first[2]


def test_a_rank_that_calls_alone_raises(ranks: list[dict[str, Any]]) -> None:
    assert all(result["alone"] for result in ranks)


def test_the_axis_of_a_larger_mesh(ranks: list[dict[str, Any]]) -> None:
    loss, names = ranks[0]["mesh"]
    assert loss == pytest.approx(_model()(_input())[0].item(), rel=1e-12)
    assert names == ("tp",)
