"""Pipelines beside data axes on eight gloo ranks, 2 x 2 x 2, follow one device in float64.

AdamW steps with clipping; ranks of different parts of the data have batches of their own.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import sp_compiler
from sp_compiler import RankMismatchError
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

_MICROBATCHES = 2
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_NORMS = (2.0, float("inf"), 3.0)


def _mesh(**axes: int) -> DeviceMesh:
    warnings.simplefilter("ignore")
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _follow(
    mesh: DeviceMesh, chosen: grids.Case, schedule: str, steps: int
) -> tuple[dict[str, float], grids.Follower, grids.Follower]:
    """Train both; the largest differences of losses, norms and parameters of this rank."""
    part, parts = sp_compiler.data_shard(mesh)
    batches = chosen.batches(steps)
    pipeline: Any = sp_compiler.pipeline(
        chosen.build(),
        mesh=mesh,
        example_inputs=((), grids.split(batches[0], parts)[part]),
        microbatches=_MICROBATCHES,
        schedule=schedule,
    )
    one, truth = grids.Follower.of(pipeline), grids.truth_of(chosen)
    worst = {"loss": 0.0, "norm": 0.0}
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        p = _NORMS[step % len(_NORMS)]
        loss = pipeline.step(**grids.split(batch, parts)[part])
        dist.all_reduce(loss)
        norm = sp_compiler.clip_grad_norm_(pipeline, grids.MAX_NORM, p)
        ours = float(loss / dist.get_world_size()), one.step(norm)
        torch.manual_seed(step)
        theirs = grids.truth_step(truth, batch, parts, _MICROBATCHES, p)
        for kind, first, second in zip(worst, ours, theirs, strict=True):
            worst[kind] = max(worst[kind], abs(first - second) / abs(second))
    true = truth.module.state_dict()
    state = pipeline.state_dict()
    worst["parameters"] = max(
        (grids.whole(value) - true[name]).abs().max().item() for name, value in state.items()
    )
    return worst, one, truth


def _on_other_grids(
    one: grids.Follower, truth: grids.Follower, chosen: grids.Case, folder: str
) -> dict[str, float]:
    """What the pipeline saved, on a grid without stages: weights, and a step after that."""
    pipeline = one.module
    saved = {
        "model": pipeline.state_dict(),
        "optimizer": get_optimizer_state_dict(pipeline.module, one.optimizer, options=_FLAT),
    }
    dcp.save(saved, checkpoint_id=folder)
    mesh = _mesh(dp_shard=dist.get_world_size() // 2, tp=2)
    part, parts = sp_compiler.data_shard(mesh)
    batch = chosen.batches(5)[4]
    own = grids.split(batch, parts)[part]
    module = sp_compiler.compile(chosen.build(), mesh=mesh, example_inputs=((), own))
    other = grids.Follower.of(module)
    weights, state = get_state_dict(module, other.optimizer, options=_FLAT)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        module,
        other.optimizer,
        model_state_dict=weights,
        optim_state_dict=loaded["optimizer"],
        options=_FLAT,
    )
    errors = {"loaded": grids.parameter_error(module, truth.module)}
    module.eval(), truth.module.eval()
    ours = grids.grid_step(other, batch, mesh, 1, 2.0)
    theirs = grids.truth_step(truth, batch, parts, 1, 2.0)
    errors["next norm"] = abs(ours[1] - theirs[1]) / theirs[1]
    return {**errors, "next parameters": grids.parameter_error(module, truth.module)}


def _grids(
    runs: list[tuple[dict[str, int], str, str, float]], steps: int, folder: str
) -> dict[str, float]:
    errors: dict[str, float] = {}
    for number, (axes, name, schedule, dropout) in enumerate(runs):
        mesh = _mesh(**axes)
        _, parts = sp_compiler.data_shard(mesh)
        with grids.lifted():
            chosen = grids.case(name, parts * _MICROBATCHES, dropout=dropout)
            worst, one, truth = _follow(mesh, chosen, schedule, steps)
            if number == 0:
                worst |= _on_other_grids(one, truth, chosen, folder)
        errors |= {f"{name} {schedule} {axes} {kind}": error for kind, error in worst.items()}
    return errors


@pytest.mark.slow
def test_two_by_two_by_two(tmp_path: Path) -> None:
    """GPT-2: tied over the stages, a vocabulary that nothing divides, dropout; grouped kv heads."""
    runs = [
        ({"dp_shard": 2, "pp": 2, "tp": 2}, "gpt2", "1f1b", 0.2),
        ({"dp_replicate": 2, "pp": 2, "tp": 2}, "llama_gqa8", "zero_bubble", 0.0),
    ]
    for errors in run_on_ranks(8, _grids, runs, 3, str(tmp_path)):
        assert max(errors.values()) < 1e-9, errors


def _calls() -> None:
    """Once per step over the data axis; weights over all parts; a policy; batches that differ."""
    mesh = _mesh(dp_shard=2, pp=2)
    part, parts = sp_compiler.data_shard(mesh)
    batch = zoo.inputs("llama", batch=8, seq=8)
    batch["labels"][:3, 4:] = -100
    own = grids.split(batch, parts)[part]
    with grids.lifted():
        truth = zoo.build("llama", layers=2)
        expected = zoo.loss_of(truth(**batch))
        expected.backward()
        pipeline: Any = sp_compiler.pipeline(
            zoo.build("llama", layers=2),
            mesh=mesh,
            example_inputs=((), own),
            microbatches=_MICROBATCHES,
            weigh=lambda input_ids, labels: (labels[:, 1:] != -100).sum(),
        )
        with grids.CollectivesByAxis(mesh) as counter:
            loss = pipeline.step(**own)
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / 4, expected.double(), rtol=1e-9, atol=1e-9)
        evaluated = pipeline.eval(**own)
        dist.all_reduce(evaluated)
        torch.testing.assert_close(evaluated, loss)
    # A block and the rest, whatever the number of microbatches; and both ends of the step, to which
    # all parts come.
    assert counter.counts["dp_shard", "allgather"] == 2 + 2
    assert counter.counts["dp_shard", "reducescatter"] == 2
    true = dict(truth.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert parameter.device_mesh.mesh_dim_names == ("dp_shard",)
        grad = grids.whole(parameter.grad)
        torch.testing.assert_close(grad, true[name].grad, rtol=1e-9, atol=1e-12)
    # A stage with other tokens than the rest.
    other = {**own, "input_ids": own["input_ids"] + dist.get_rank(mesh["pp"].get_group())}
    with pytest.raises(RankMismatchError, match=r"'input_ids' differs between .*one pipeline"):
        pipeline.step(**other)
    _in_bfloat16(mesh, own, evaluated.item() / 4)


def _in_bfloat16(mesh: DeviceMesh, own: dict[str, Any], loss: float) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pipeline: Any = sp_compiler.pipeline(
        zoo.build("llama", dtype=torch.float32, layers=2),
        mesh=mesh,
        example_inputs=((), own),
        microbatches=_MICROBATCHES,
        fsdp={"mp_policy": policy},
    )
    mean = pipeline.step(**own)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in pipeline.parameters())
    assert abs(mean.item() - loss) < 0.1 * loss


@pytest.mark.slow
def test_calls_over_data_axes() -> None:
    run_on_ranks(4, _calls)
