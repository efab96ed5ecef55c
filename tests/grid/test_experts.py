"""Experts divided over ranks of a grid, beside one device on the batches of all ranks, in float64.

Router, experts and norms of gradients: Megatron-LM#5916 left some experts out of the norm where
there was tensor parallelism, too.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import sp_compiler
from sp_compiler.base.errors import ArgumentError, RankMismatchError, UnsupportedError
from tests.helpers import expert_models, grids
from tests.helpers.expert_models import Grouped, Picked
from tests.helpers.ranks import run_on_copies, run_on_ranks
from tests.helpers.shared_programs import compile_for_ranks, shared_programs

_TOLERANCE = 1e-9


def _case(parts: int, make: Any = Grouped) -> grids.Case:
    return grids.Case(
        lambda: expert_models.model(make),
        lambda steps: expert_models.batches(steps, rows=2 * parts),
    )


def _with_biases() -> Grouped:
    return Grouped(bias=True)


def _followed(axes: dict[str, int], steps: int) -> tuple[Any, Any, dict[str, float]]:
    mesh = grids.mesh(**axes)
    part, parts = sp_compiler.data_shard(mesh)
    with grids.lifted():
        worst, one, truth = grids.follow(mesh, _case(parts, _with_biases), steps, accumulate=2)
        # Without gradients, and in the end a batch of another size.
        size = {"rows": 3 * parts, "length": 5} if "dp_shard" in axes else {"rows": parts}
        batch = expert_models.batches(1, **size)[0]
        with torch.no_grad():
            loss = one.module(**grids.split(batch, parts)[part])
        dist.all_reduce(loss)
    mean = float(loss) / dist.get_world_size()
    worst["evaluated"] = abs(mean - float(truth.module(**batch)))
    return one.module, truth.module, worst


def _compile() -> None:
    """For microbatches of one row. What other sizes need every rank compiles itself."""
    with grids.lifted(), shared_programs():
        micro = expert_models.batches(1, rows=1)[0]
        for tp, fsdp in ((1, True), (2, False)):
            compile_for_ranks(expert_models.model(_with_biases), micro, tp=tp, ep=2, fsdp=fsdp)


def _trained(folder: str) -> dict[str, Any]:
    with shared_programs():
        return _followed_and_saved(folder)


def _followed_and_saved(folder: str) -> dict[str, Any]:
    worst = {
        str(axes): _followed(axes, steps)[2]
        for axes, steps in (({"dp_shard": 2, "ep": 2, "tp": 1}, 3), ({"ep": 2, "tp": 2}, 3))
    }
    # Beside the axis of replicas; all that a checkpoint may meet.
    axes = {"dp_replicate": 2, "ep": 2, "tp": 1}
    module, truth, worst["replicated"] = _followed(axes, 1)
    with grids.CollectivesByAxis(grids.mesh(**axes)) as counter:
        module(**expert_models.batches(1, rows=1)[0]).backward()
    return {
        "worst": worst,
        "truth": truth.state_dict(),
        "sent": counter.counts["ep", "alltoall"],
        "planned": {item.kind: item.count for item in module.plan.collectives},
        **_saved(module, folder),
    }


def _saved(module: Any, folder: str) -> dict[str, Any]:
    """The unsharded weights, and whether every way to read them back gives the same."""
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder)
    before = {name: grids.whole(value).clone() for name, value in module.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(before, str(Path(folder, "model.safetensors")))
    dist.barrier()

    def from_checkpoint() -> None:
        state = module.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
        module.load_state_dict(state)

    ways = {
        "state dict": lambda: module.load_state_dict(before),
        "files": lambda: module.load_pretrained(Path(folder, "model.safetensors")),
        "checkpoint": from_checkpoint,
    }
    read = {}
    for name, load in ways.items():
        with torch.no_grad():
            for parameter in module.parameters():
                grids.local(parameter).zero_()
        load()
        after = {key: grids.whole(value) for key, value in module.state_dict().items()}
        read[name] = all(torch.equal(after[key], value) for key, value in before.items())
    of_experts = {n: p for n, p in module.named_parameters() if "experts" in n}
    return {
        "read": read,
        "full": module.full_state_dict(),
        "parts": {name: tuple(grids.local(p).shape) for name, p in of_experts.items()},
    }


@pytest.mark.slow
def test_training_follows_one_device(tmp_path: Path) -> None:
    """Routers, experts, biases and norms, with accumulation; checkpoints go anywhere."""
    found = run_on_copies(4, _compile, _trained, str(tmp_path))
    for each in found:
        for worst in each["worst"].values():
            assert max(worst.values()) < _TOLERANCE, each["worst"]
        assert all(each["read"].values()), each["read"]
        # Per layer: numbers of rows, rows and results; and gradients of both.
        assert each["sent"] == each["planned"]["all_to_all"] == 2 * 5
        assert each["parts"]["layers.0.experts.up"] == (2, 6, 12)
        assert each["parts"]["layers.1.experts.down_bias"] == (2, 6)
    full, truth = found[0]["full"], found[0]["truth"]
    assert full.keys() == truth.keys()
    # On a grid without the axis, here one device.
    plain = sp_compiler.compile(
        expert_models.model(_with_biases), tp=1, example_inputs=((), expert_models.batches(1)[0])
    )
    state = plain.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load({"model": state}, checkpoint_id=str(tmp_path))
    for name, value in truth.items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=_TOLERANCE)
        assert torch.equal(state[name], full[name])


def test_each_expert_counts_in_the_norms_that_are_compared() -> None:
    """Without one, as in Megatron-LM#5916, they would be off by far more than is allowed."""
    model = expert_models.model(_with_biases)
    model(**expert_models.batches(1, rows=8)[0]).backward()
    whole = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    for name, parameter in model.named_parameters():
        if "experts" in name:
            assert parameter.grad is not None
            for of_expert in parameter.grad:
                # Of the square, which is a sum.
                assert of_expert.square().sum() > 1e-6 * whole**2, name


def _refused(_: Any) -> dict[str, str]:
    mesh = grids.mesh(ep=2, tp=1)
    batch = expert_models.batches(1)[0]
    texts = {}
    wrong: dict[str, dict[str, Any]] = {"fsdp": {"fsdp": False}, "verify": {"verify": True}}
    for name, options in wrong.items():
        with pytest.raises((ArgumentError, UnsupportedError)) as refused:
            sp_compiler.compile(expert_models.model(Picked), mesh=mesh, **options)
        texts[name] = str(refused.value)
    on_grid: dict[str, Any] = {"mesh": mesh}
    compiled = torch.compile(expert_models.model(Picked), backend="sp_compiler", options=on_grid)
    with pytest.raises(UnsupportedError) as refused:
        compiled(**batch)
    texts["torch.compile"] = str(refused.value)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedError) as refused:
        sp_compiler.compile(model, mesh=mesh, example_inputs=((torch.zeros(2, 4),), {}))
    model(torch.zeros(2, 4))  # given back
    texts["none"] = str(refused.value)
    module = sp_compiler.compile(expert_models.model(Picked), mesh=mesh, example_inputs=((), batch))
    uneven = expert_models.batches(1, rows=2 + dist.get_rank())[0]
    with pytest.raises(RankMismatchError) as mismatch:
        module(**uneven)
    texts["uneven"] = str(mismatch.value)
    return texts


@pytest.mark.slow
def test_what_is_refused() -> None:
    for texts in run_on_ranks(2, _refused, None):
        assert "fsdp=False, but the mesh has an axis" in texts["fsdp"]
        assert "simulated ranks have one batch" in texts["verify"]
        assert "alone, not by torch.compile" in texts["torch.compile"]
        assert "the model has no experts" in texts["none"]
        assert "different numbers of rows for experts: [16, 24]" in texts["uneven"]
