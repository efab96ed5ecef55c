"""Segmented parameters, sharded outputs, dropout seeds and meshes of the compiled module."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sp_compiler.base.errors import ArgumentError, RankMismatchError
from sp_compiler.base.placement import S
from sp_compiler.base.shards import local_part
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.runtime.group import tensor_parallel_group
from tests.helpers.ranks import run_on_ranks
from tests.models.handmade_fused import FusedModel, handmade_fused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

_EQUAL, _UNEQUAL = (4, 4, 4), (8, 2, 2)


def _model() -> FusedModel:
    torch.manual_seed(7)
    return FusedModel(12).double()


def _input() -> torch.Tensor:
    return torch.arange(20, dtype=torch.float64).view(5, 4) / 10


def _compiled(segments: tuple[int, ...], p: float = 0.0) -> Any:
    group = tensor_parallel_group(2)
    return DistributedModule(_model(), group, lambda *args: handmade_fused(segments, 2, p))


def _on_ranks(folder: str) -> dict[str, Any]:
    return {
        "segments": [_segments(_EQUAL), _segments(_UNEQUAL)],
        "checkpoints": _checkpoints(folder),
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


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _steps(module: Any, optimizer: torch.optim.Optimizer, num: int) -> list[torch.Tensor]:
    for seed in range(num):
        optimizer.zero_grad()
        module(_input() + seed)[0].backward()
        optimizer.step()
    optimizer.zero_grad()
    state = (*module.state_dict().values(), *optimizer.state_dict()["state"][0].values())
    return [_whole(value).clone() for value in state]


def _adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1)


def _save(module: Any, optimizer: torch.optim.Optimizer, folder: str, step_by_step: bool) -> None:
    if step_by_step:  # as PyTorch's guide does it
        model_state, optimizer_state = get_state_dict(module, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    else:
        dcp.save({"model": module, "optimizer": optimizer}, checkpoint_id=folder)


def _load(module: Any, optimizer: torch.optim.Optimizer, folder: str, step_by_step: bool) -> None:
    if not step_by_step:
        optimizer.load_state_dict(_blank(module, optimizer))
        dcp.load({"model": module, "optimizer": optimizer}, checkpoint_id=folder)
        return
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )


def _blank(module: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of an optimizer that has none: whole tensors, as one rank would have saved them."""
    zeros = torch.zeros(module.fused.weight.shape, dtype=torch.float64)
    entry = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    return {**optimizer.state_dict(), "state": {0: entry}}


def _checkpoints(folder: str) -> Any:
    """Saved by two ranks and by one, read by two; training goes on as if nothing had been."""
    whole = _model()
    optimizer = _adam(whole)
    _steps(whole, optimizer, 2)
    if dist.get_rank() == 0:
        state = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/one", no_dist=True)
    dist.barrier()
    expected = _steps(whole, optimizer, 2)
    for segments in (_EQUAL, _UNEQUAL):
        for step_by_step in (False, True):
            name = f"{folder}/{segments[0]}{step_by_step}"
            module = _compiled(segments)
            module.prepare(_input())
            optimizer = _adam(module)
            _steps(module, optimizer, 2)
            _save(module, optimizer, name, step_by_step)
            for source in (name, *([] if step_by_step else [f"{folder}/one"])):
                again = _compiled(segments)
                again.prepare(_input())
                with torch.no_grad():
                    again.fused.weight.zero_()
                resumed = _adam(again)
                _load(again, resumed, source, step_by_step)
                torch.testing.assert_close(_steps(again, resumed, 2), expected, rtol=1e-11, atol=0)
            torch.testing.assert_close(_steps(module, optimizer, 2), expected, rtol=1e-11, atol=0)
    module = _compiled(_UNEQUAL)
    module.prepare(_input())
    optimizer = _adam(module)
    _steps(module, optimizer, 2)
    options = StateDictOptions(full_state_dict=True)
    states = get_state_dict(module, optimizer, options=options)
    again = _compiled(_UNEQUAL)
    again.prepare(_input())
    resumed = _adam(again)
    set_state_dict(
        again, resumed, model_state_dict=states[0], optim_state_dict=states[1], options=options
    )
    torch.testing.assert_close(_steps(again, resumed, 2), expected, rtol=1e-11, atol=0)
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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    grad = local_part(expected.fused.weight.grad, S(0, _EQUAL), rank, world_size)
    torch.testing.assert_close(module.fused.weight.grad.to_local(), grad)
    replicated = DTensor.from_local(_input(), y.device_mesh, [Replicate()])
    torch.testing.assert_close(module(replicated)[0], loss)
    with pytest.raises(ArgumentError, match="full on every rank"):
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
    group = tensor_parallel_group(2, rank_timeout=timedelta(seconds=1))
    module = DistributedModule(_model(), group, lambda *args: handmade_fused(_EQUAL, 2))
    module(_input())
    if dist.get_rank() == 0:
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
    with pytest.raises(ArgumentError, match=r"tp=4, but the mesh has 2.*leave out tp="):
        tensor_parallel_group(4, mesh)
    with pytest.raises(ArgumentError, match='named "tp"'):
        tensor_parallel_group(mesh=mesh["dp"])
    with pytest.raises(ArgumentError, match="default process group has 2 ranks"):
        tensor_parallel_group(4)
    return module(_input())[0].item(), module.fused.weight.device_mesh.mesh_dim_names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    return run_on_ranks(2, _on_ranks, folder)


def test_segmented_weights_show_true_values(ranks: list[dict[str, Any]]) -> None:
    assert [result["segments"] for result in ranks] == [[True, True]] * 2


def test_checkpoints_of_segmented_weights(ranks: list[dict[str, Any]], folder: str) -> None:
    """One device goes on where two ranks were: model and optimizer."""
    assert all(result["checkpoints"] for result in ranks)
    whole = _model()
    optimizer = _adam(whole)
    _steps(whole, optimizer, 2)
    expected = _steps(whole, optimizer, 2)
    for name in ("4False", "8False", "4True", "8True"):
        model = _model()
        with torch.no_grad():
            model.fused.weight.zero_()
        resumed = _adam(model)
        _load(model, resumed, f"{folder}/{name}", name.endswith("True"))
        torch.testing.assert_close(_steps(model, resumed, 2), expected, rtol=1e-11, atol=0)


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
