"""Pipelines beside data axes on eight gloo ranks, 2 x 2 x 2, follow one device in float64.

AdamW steps with clipping; ranks of different parts of the data have batches of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import sp_compiler
from sp_compiler import RankMismatchError
from tests.helpers import grids
from tests.helpers.ranks import run_on_copies
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.models import zoo

_MICROBATCHES = 2


_Runs = list[tuple[dict[str, int], str, str, float]]


def _compile(runs: _Runs) -> None:
    """Programs of stages, and where dropout is on those of one device."""
    with grids.lifted(), shared_programs():
        for axes, name, schedule, dropout in runs:
            chosen = grids.case(name, 1, dropout=dropout)
            micro = chosen.batches(1)[0]
            compile_for_ranks(chosen.build(), micro, tp=axes["tp"], schedule=schedule)
            if dropout:
                compile_for_ranks(chosen.build(), micro)


def _grids(runs: _Runs, steps: int) -> dict[str, float]:
    errors: dict[str, float] = {}
    for axes, name, schedule, dropout in runs:
        mesh = grids.mesh(**axes)
        part, parts = sp_compiler.data_shard(mesh)
        with grids.lifted(), shared_programs(only_known=True):
            chosen = grids.case(name, parts * _MICROBATCHES, dropout=dropout)
            worst, pipeline, _ = grids.follow_pipeline(
                mesh, chosen, steps, _MICROBATCHES, schedule=schedule
            )
            with grids.CollectivesByAxis(mesh) as counter:
                pipeline.step(**grids.split(chosen.batches(1)[0], parts)[part])
        _check_counts(pipeline, counter, mesh, seeds=dropout > 0)
        errors |= {f"{name} {schedule} {axes} {kind}": error for kind, error in worst.items()}
    return errors


def _check_counts(
    pipeline: Any, counter: grids.CollectivesByAxis, mesh: DeviceMesh, *, seeds: bool
) -> None:
    """What is planned for this rank's stage, over the axes of the plan, and nothing else."""
    rank, plan = mesh["pp"].get_local_rank(), pipeline.plan
    start = sum(map(len, pipeline.stages[:rank]))
    chain = [call for call in plan.calls if call.block != "Tables"]
    own = chain[start : start + len(pipeline.stages[rank])]
    assert tuple(call.path for call in own) == pipeline.stages[rank]
    expected: Counter[tuple[str, str]] = Counter()
    elements = 0
    for block in (plan.block(call.block) for call in own):
        for item in (*block.forward, *block.backward):
            expected["tp", item.kind.replace("_", "")] += _MICROBATCHES * item.count
            if item.kind == "all_reduce":
                elements += _MICROBATCHES * item.num_bytes // 8
    # A stage's one block, and the rest of it.
    groups = 2
    if "dp_shard" in (mesh.mesh_dim_names or ()):
        expected["dp_shard", "allgather"] = expected["dp_shard", "reducescatter"] = groups
    else:
        expected["dp_replicate", "allreduce"] = groups
    if seeds:  # one for each microbatch, together
        expected["tp", "broadcast"] = 1
    # Norms and biases, once in a step: the shards that FSDP2 leaves, not the whole parameters.
    expected["tp", "allreduce"] += 1
    replicated = [p for p in pipeline.parameters() if p.placements[-1].is_replicate()]
    elements += sum(grids.local(parameter).numel() for parameter in replicated)
    found = {key: count for key, count in counter.counts.items() if key[0] != "pp"}
    assert found == dict(expected), (found, expected)
    assert counter.elements["tp", "allreduce"] == elements


@pytest.mark.slow
def test_two_by_two_by_two() -> None:
    """GPT-2: tied over the stages, a vocabulary that nothing divides, dropout; grouped kv heads."""
    runs = [
        ({"dp_shard": 2, "pp": 2, "tp": 2}, "gpt2", "1f1b", 0.2),
        ({"dp_replicate": 2, "pp": 2, "tp": 2}, "llama_gqa8", "zero_bubble", 0.0),
    ]
    for errors in run_on_copies(8, functools.partial(_compile, runs), _grids, runs, 3):
        assert max(errors.values()) < 1e-9, errors


def _calls() -> None:
    """Once per step over the data axis; weights over all parts; a policy; batches that differ."""
    mesh = grids.mesh(dp_shard=2, pp=2)
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
        evaluated = pipeline.eval_loss(**own)
        dist.all_reduce(evaluated)
        torch.testing.assert_close(evaluated, loss)
    # A block and the rest, whatever the number of microbatches. (What all parts compare at both
    # ends of the step goes past what counts.)
    assert counter.counts["dp_shard", "allgather"] == 2
    assert counter.counts["dp_shard", "reducescatter"] == 2
    true = dict(truth.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert parameter.device_mesh.mesh_dim_names == ("dp_shard",)
        grad = grids.whole(parameter.grad)
        torch.testing.assert_close(grad, true[name].grad, rtol=1e-9, atol=1e-12)
    # A stage with other tokens than the rest.
    other = {**own, "input_ids": own["input_ids"] + dist.get_rank(mesh["pp"].get_group())}
    with pytest.raises(RankMismatchError, match=r"input_ids differs between .*one pipeline"):
        pipeline.step(**other)
    _in_bfloat16(mesh, own, evaluated.item() / 4)


def _pipeline_in_bfloat16(mesh: DeviceMesh, own: dict[str, Any], schedule: str) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sp_compiler.pipeline(
        zoo.build("llama", dtype=torch.float32, layers=2),
        mesh=mesh,
        example_inputs=((), own),
        microbatches=_MICROBATCHES,
        fsdp={"mp_policy": policy},
        schedule=schedule,
    )


def _in_bfloat16(mesh: DeviceMesh, own: dict[str, Any], loss: float) -> None:
    pipeline = _pipeline_in_bfloat16(mesh, own, "1f1b")
    mean = pipeline.step(**own)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in pipeline.parameters())
    assert abs(mean.item() - loss) < 0.1 * loss


def _rehearsal() -> None:
    with contextlib.suppress(AssertionError):  # of collectives that nothing called for
        _calls()
    own = zoo.inputs("llama", batch=4, seq=8)
    _pipeline_in_bfloat16(grids.mesh(dp_shard=2, pp=2), own, "1f1b").step(**own)


# "1f1b" casts beside data axes alone, above.
_SCHEDULE = "zero_bubble"


def _train_in_bfloat16() -> None:
    """Partial sums over "tp" are added up in bfloat16, reduced and summed in float32."""
    mesh = grids.mesh(dp_shard=2, pp=2, tp=2)
    part, parts = sp_compiler.data_shard(mesh)
    batch = zoo.inputs("llama", batch=8, seq=8)
    own = grids.split(batch, parts)[part]
    truth = zoo.build("llama", dtype=torch.float32, layers=2)
    zoo.loss_of(truth(**batch)).backward()
    true = dict(truth.named_parameters())
    pipeline = _pipeline_in_bfloat16(mesh, own, _SCHEDULE)
    # Twice: what is there already is not summed again.
    for steps in (1, 2):
        pipeline.step(**own)
        for name, parameter in pipeline.named_parameters():
            first, second = grids.whole(parameter.grad), steps * true[name].grad
            angle = 1 - torch.cosine_similarity(first.flatten(), second.flatten(), dim=0)
            # bfloat16 has 8 bits; without another rank's part it would be half as long.
            assert angle < 2e-2, (steps, name)
            assert 0.9 < first.norm() / second.norm() < 1.1, (steps, name)


@pytest.mark.slow
def test_mixed_precision_beside_tensor_parallelism() -> None:
    run_rehearsed(8, _train_in_bfloat16)


@pytest.mark.slow
def test_calls_over_data_axes() -> None:
    run_rehearsed(4, _calls, rehearsal=_rehearsal)
