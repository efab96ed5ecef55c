"""A gradient that is infinite on one stage stops the step of all stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from tests.helpers.rehearsal import run_rehearsed
from tests.models import zoo


def _one(weights: list[Any]) -> list[Any]:
    return [torch.optim.AdamW(weights)]


def _fused(weights: list[Any]) -> list[Any]:
    return [torch.optim.AdamW(weights, fused=True)]


def _several(weights: list[Any]) -> list[Any]:
    """One for most weights of both stages, and one that only the second stage has."""
    if dist.get_rank() == 0:
        return _one(weights)
    return [*_one(weights[:-1]), *_one(weights[-1:])]


_OPTIMIZERS = {"torch": _one, "fused": _fused, "several": _several}


def _steps() -> list[tuple[str, float, float]]:
    """Which step, the scale behind it, and how far it moved this rank's first parameter.

    Of a step with finite gradients, one whose second stage has an infinity, and one whose first
    stage has no gradients. A tied weight is on both.
    """
    inputs, results = zoo.inputs("gpt2", batch=4, seq=8), []
    pipeline: Any = sp_compiler.pipeline(
        zoo.build("gpt2", layers=2),
        mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        example_inputs=((), inputs),
        microbatches=2,
    )
    for name, made in _OPTIMIZERS.items():
        optimizers = made(list(pipeline.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for kind in ("finite", "infinite", "none"):
            pipeline.module.zero_grad()
            pipeline.step(**inputs)
            weights = list(pipeline.parameters())
            before = weights[0].detach().clone()
            if kind == "infinite" and dist.get_rank() == 1:
                weights[-1].grad.fill_(float("inf"))
            if kind == "none" and dist.get_rank() == 0:
                pipeline.module.zero_grad()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            moved = (weights[0] - before).abs().max().item()
            results.append((f"{name}, {kind}", scaler.get_scale(), moved))
    return results


@pytest.mark.slow
def test_all_stages_skip_the_step() -> None:
    for rank, steps in enumerate(run_rehearsed(2, _steps)):
        assert len(steps) == 3 * len(_OPTIMIZERS)
        for kind, scale, moved in steps:
            assert scale == (4.0 if kind.endswith(" finite") else 2.0), (rank, kind)
            stays = kind.endswith(" infinite") or (rank == 0 and kind.endswith("none"))
            assert (moved == 0) == stays, (rank, kind)
