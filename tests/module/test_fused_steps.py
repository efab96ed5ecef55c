"""Fused optimizers on DTensors: the step of the local parts, whatever their meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.module.dtensors.patches import step_local_parts
from sp_compiler.module.dtensors.segmented_shard import segmented_shard
from tests.helpers.fake_group import fake_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(4, rank=1):
        step_local_parts()
        yield


def _meshes() -> tuple[DeviceMesh, DeviceMesh]:
    both = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    return both["tp"], both


def _parameters() -> list[nn.Parameter]:
    """On two meshes: rows, an uneven and an empty part, segments, replicated; and one without."""
    generator = torch.Generator().manual_seed(0)
    tp, both = _meshes()
    places: list[tuple[DeviceMesh, list[Any], tuple[int, ...], tuple[int, ...]]] = [
        (tp, [Shard(0)], (3, 4), (6, 4)),
        (tp, [Shard(0)], (2, 4), (5, 4)),
        (tp, [Shard(0)], (0, 4), (1, 4)),
        (tp, [segmented_shard(0, (4, 2))], (3, 4), (6, 4)),
        (tp, [Replicate()], (4,), (4,)),
        (both, [Shard(0), Shard(1)], (3, 2), (6, 4)),
        (both, [Replicate(), Shard(0)], (3, 4), (6, 4)),
    ]
    parameters = []
    for mesh, placements, part, full in places:
        local = torch.randn(part, generator=generator)
        stride = torch.empty(full).stride()
        x = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(full), stride=stride
        )
        parameters.append(nn.Parameter(x))
    return [*parameters, nn.Parameter(torch.randn(3, generator=generator))]


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _like(x: DTensor, local: torch.Tensor, placements: list[Placement] | None = None) -> DTensor:
    return DTensor.from_local(
        local,
        x.device_mesh,
        placements or x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


STEPS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), fused=True),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_step_is_that_of_local_parts(name: str, scaled: bool) -> None:
    parameters = _parameters()
    locals_ = [nn.Parameter(_local(p.detach()).clone()) for p in parameters]
    ours, expected = STEPS[name](parameters), STEPS[name](locals_)
    for step in range(3):
        for p, local in zip(parameters, locals_, strict=True):
            local.grad = torch.full_like(local, step + 1.0)
            p.grad = _like(p, local.grad.clone()) if isinstance(p, DTensor) else local.grad.clone()
        for optimizer in (ours, expected) if scaled else ():
            # As GradScaler does; the second step is skipped.
            optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(float(step == 1))  # type: ignore[attr-defined]
        ours.step()
        expected.step()
    for p, local in zip(parameters, locals_, strict=True):
        assert torch.equal(_local(p.detach()), local)
        for key, value in expected.state[local].items():
            assert torch.equal(_local(ours.state[p][key]), value)


def test_a_gradient_placed_otherwise_is_redistributed() -> None:
    tp, _ = _meshes()
    p = nn.Parameter(_like(_parameters()[0], torch.zeros(3, 4)))  # type: ignore[arg-type]
    full = torch.arange(24.0).view(6, 4)
    p.grad = DTensor.from_local(full, tp, [Replicate()], run_check=False)
    torch.optim.SGD([p], lr=1.0, fused=True).step()
    assert torch.equal(_local(p.detach()), -full[3:])


@pytest.mark.parametrize("placed", [False, True])
def test_moments_placed_otherwise_are_refused(placed: bool) -> None:
    p = _parameters()[0]
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    wrong = _like(p, torch.zeros(6, 4), [Partial()]) if placed else torch.zeros(6, 4)  # type: ignore[arg-type]
    optimizer.state[p]["exp_avg_sq"] = wrong
    with pytest.raises(UnsupportedError, match=r"'exp_avg_sqs' .*\(6, 4\).*load_state_dict"):
        optimizer.step()
