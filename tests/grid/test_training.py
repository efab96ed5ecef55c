"""Training on grids of data-parallel and tensor-parallel ranks follows one device.

AdamW steps with clipping, in float64; without dropout the truth is the model in eager, with dropout
the module compiled for one rank, given the seeds of each part of the data.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import sp_compiler
from tests.helpers import grids
from tests.helpers.ranks import run_on_copies
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.models import zoo

_TOLERANCE = 1e-9


def _compile_gpt2_with_dropout(tp: int) -> None:
    """For microbatches of one row, and for one device."""
    with grids.lifted(), shared_programs():
        chosen = grids.case("gpt2", 1, dropout=0.2)
        micro = grids.split(chosen.batches(1)[0], 2)[0]
        compile_for_ranks(chosen.build(), micro, tp=tp, fsdp=True)
        compile_for_ranks(chosen.build(), micro)


def _gpt2_with_dropout(axes: dict[str, int], steps: int) -> dict[str, Any]:
    mesh = grids.mesh(**axes)
    part, parts = sp_compiler.data_shard(mesh)
    with grids.lifted(), shared_programs(only_known=True):
        chosen = grids.case("gpt2", parts, dropout=0.2)
        worst, one, _ = grids.follow(mesh, chosen, steps, accumulate=2)
        batch = grids.split(chosen.batches(1)[0], 2 * parts)[part]
        with grids.CollectivesByAxis(mesh) as counter:
            one.module(**batch).loss.backward()
    replicated = [
        parameter.to_local().numel()
        for parameter in one.module.parameters()
        if isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()
    ]
    return {
        "worst": worst,
        "counts": dict(counter.counts),
        "reduced": counter.elements["tp", "allreduce"],
        "replicated": sum(replicated),
        "tokens": batch["input_ids"].numel(),
    }


def _wrap_by_hand(module: Any, mesh: DeviceMesh) -> None:
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=True)
    fully_shard(module, mesh=mesh["dp_shard"])


def _compile(tp: int, names: list[str], *, by_hand: bool) -> None:
    with grids.lifted(), shared_programs():
        for name in names:
            chosen = grids.case(name, 1)
            batch = chosen.batches(1)[0]
            compile_for_ranks(chosen.build(), batch, tp=tp, fsdp=True)
            if by_hand and name == "llama_gqa8":
                compile_for_ranks(chosen.build(), grids.split(batch, 2)[0], tp=tp)


def _on_a_grid(axes: dict[str, int], names: list[str], steps: int) -> dict[str, Any]:
    mesh = grids.mesh(**axes)
    _, parts = sp_compiler.data_shard(mesh)
    results = {}
    with grids.lifted(), shared_programs(only_known=True):
        for name in names:
            worst, _, _ = grids.follow(mesh, grids.case(name, parts), steps)
            results[name] = worst
        if "dp_shard" in axes and "llama_gqa8" in names:
            case = grids.case("llama_gqa8", parts)
            results["by hand"], _, _ = grids.follow(
                mesh, case, 2, accumulate=2, prepare=_wrap_by_hand, fsdp=False
            )
            offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
            results["offloaded"], _, _ = grids.follow(mesh, case, 2, fsdp=offload)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "names", "steps"),
    [
        ({"dp_shard": 2, "tp": 2}, ["llama_gqa8", "mixtral", "t5"], 3),
        ({"dp_replicate": 2, "tp": 2}, ["gpt2", "llama_gqa8"], 5),
        ({"dp_shard": 2, "tp": 1}, ["gpt2"], 3),
    ],
    ids=["sharded", "replicated", "one-rank"],
)
def test_models_on_every_grid(axes: dict[str, int], names: list[str], steps: int) -> None:
    before = functools.partial(_compile, axes["tp"], names, by_hand="dp_shard" in axes)
    for result in run_on_copies(axes["tp"] * 2, before, _on_a_grid, axes, names, steps):
        errors = {name: max(worst.values()) for name, worst in result.items()}
        assert max(errors.values()) < _TOLERANCE, errors


@pytest.mark.slow
def test_gpt2_with_dropout_and_accumulation_on_two_by_two_by_two() -> None:
    """Tied, a vocabulary that nothing divides, a fused weight; and what it sends."""
    axes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    before = functools.partial(_compile_gpt2_with_dropout, 2)
    for result in run_on_copies(8, before, _gpt2_with_dropout, axes, 3):
        assert max(result["worst"].values()) < _TOLERANCE, result["worst"]
        counts = result["counts"]
        # Root and two blocks forward; the blocks again backward; one reduction for each of three.
        assert counts["dp_shard", "allgather"] == 5
        assert counts["dp_shard", "reducescatter"] == 3
        assert ("dp_shard", "allreduce") not in counts
        # Without a fourth for the accumulated gradients: HSDP sums over the axis once a group.
        assert counts["dp_replicate", "allreduce"] == 3
        # Two of the loss, its maxima, and sums with targets; norms and biases together, this
        # rank's shards alone.
        assert counts["tp", "allreduce"] == 3
        assert result["reduced"] == 3 * result["tokens"] + result["replicated"]


def _mixed_precision() -> dict[str, float]:
    """Beside eager under the same FSDP2, which runs once on each of the tensor-parallel ranks."""
    mesh = grids.mesh(dp_shard=2, tp=2)
    part, _ = sp_compiler.data_shard(mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch = grids.split(zoo.inputs("llama_gqa8", batch=4, seq=8), 2)[part]
    build = lambda: zoo.build("llama_gqa8", dtype=torch.float32)  # noqa: E731
    eager: Any = build()
    for layer in eager.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=policy)
    fully_shard(eager, mesh=mesh["dp_shard"], mp_policy=policy)
    module = sp_compiler.compile(
        build(), mesh=mesh, example_inputs=((), batch), fsdp={"mp_policy": policy}
    )
    losses = [one(**batch).loss for one in (module, eager)]
    for loss in losses:
        loss.backward()
    angles = {"loss": abs(losses[0] - losses[1]).item()}
    true = dict(eager.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        first, second = (grids.whole(g).flatten() for g in (parameter.grad, true[name].grad))
        angles[name] = 1 - torch.cosine_similarity(first, second, dim=0).item()
    return angles


@pytest.mark.slow
def test_mixed_precision_beside_eager() -> None:
    for result in run_rehearsed(4, _mixed_precision):
        # bfloat16 has 8 bits; a gradient that lacked a rank's part would be far off.
        assert max(result.values()) < 1e-2, result
