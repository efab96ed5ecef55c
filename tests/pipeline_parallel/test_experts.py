"""Experts divided over ranks of a pipeline, beside one device on the batches of all, in float64."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import sp_compiler
from tests.helpers import expert_models, grids
from tests.helpers.expert_models import Grouped
from tests.helpers.ranks import run_on_copies, run_on_ranks
from tests.helpers.shared_programs import compile_for_ranks, shared_programs

_MICROBATCHES = 2


def _with_biases() -> torch.nn.Module:
    return expert_models.model(lambda: Grouped(bias=True))


def _trained(folder: str) -> dict[str, Any]:
    """Three steps with clipping, two batches without the optimizer between them, a checkpoint."""
    mesh = grids.mesh(pp=2, ep=2)
    part, parts = sp_compiler.data_shard(mesh)
    rows = 2 * parts * _MICROBATCHES
    chosen = grids.Case(_with_biases, lambda steps: expert_models.batches(steps, rows=rows))
    with grids.lifted():
        worst, pipeline, truth = grids.follow_pipeline(mesh, chosen, 3, _MICROBATCHES)
        # Gradients of a step are added to those of the one before.
        with grids.CollectivesByAxis(mesh) as counter:
            for batch in (batches := chosen.batches(2)):
                pipeline.step(**grids.split(batch, parts)[part])
        for batch in batches:
            truth.module(**batch).backward()
    true = {name: value.grad for name, value in truth.module.named_parameters()}
    worst["gradients"] = max(
        (grids.whole(value.grad) - true[name]).abs().max().item()
        for name, value in pipeline.named_parameters()
    )
    dcp.save({"model": pipeline.state_dict()}, checkpoint_id=folder)
    own = {name: grids.whole(value).clone() for name, value in pipeline.state_dict().items()}
    with torch.no_grad():
        for parameter in pipeline.parameters():
            grids.local(parameter).zero_()
    state = pipeline.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    pipeline.load_state_dict(state)
    after = {name: grids.whole(value) for name, value in pipeline.state_dict().items()}
    return {
        "worst": worst,
        "sent": counter.counts["ep", "alltoall"],
        "read": all(torch.equal(after[name], value) for name, value in own.items()),
        "truth": truth.module.state_dict(),
        "stages": pipeline.stages,
        "parts": {
            name: tuple(grids.local(value).shape)
            for name, value in pipeline.named_parameters()
            if "experts" in name
        },
    }


@pytest.mark.slow
def test_stages_with_a_part_of_the_experts_follow_one_device(tmp_path: Path) -> None:
    found = run_on_ranks(4, _trained, str(tmp_path))
    for rank, each in enumerate(found):
        assert max(each["worst"].values()) < 1e-9, each["worst"]
        assert each["read"]
        layers = {path for path in each["stages"][rank // 2] if path}
        assert len(layers) == 1
        assert {name.rpartition(".experts.")[0] for name in each["parts"]} == layers
        assert {shape[0] for shape in each["parts"].values()} == {expert_models.EXPERTS // 2}
        # A layer's numbers of rows, rows and results; gradients of both; of every microbatch.
        assert each["sent"] == 2 * _MICROBATCHES * 5
    plain = _with_biases().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load({"model": plain}, checkpoint_id=str(tmp_path))
    for name, value in found[0]["truth"].items():
        torch.testing.assert_close(plain[name], value, rtol=0, atol=1e-9)


_Runs = list[tuple[dict[str, int], str, str]]


def _compile(runs: _Runs) -> None:
    with grids.lifted(), shared_programs():
        for axes, name, schedule in runs:
            chosen = grids.case(name, 1)
            tp, ep = axes.get("tp", 1), axes["ep"]
            compile_for_ranks(chosen.build(), chosen.batches(1)[0], tp=tp, ep=ep, schedule=schedule)


def _mixtures(runs: _Runs) -> dict[str, float]:
    errors: dict[str, float] = {}
    for axes, name, schedule in runs:
        mesh = grids.mesh(**axes)
        _, parts = sp_compiler.data_shard(mesh)
        with grids.lifted(), shared_programs(only_known=True):
            chosen = grids.case(name, parts * _MICROBATCHES)
            worst, *_ = grids.follow_pipeline(mesh, chosen, 2, _MICROBATCHES, schedule=schedule)
        errors |= {f"{name} {schedule} {axes} {kind}": error for kind, error in worst.items()}
    return errors


@pytest.mark.slow
def test_mixtures_of_transformers_on_three_axes() -> None:
    """With FSDP2 beside the experts, and with each expert's width divided over "tp"."""
    runs = [
        ({"pp": 2, "dp_shard": 2, "ep": 2}, "mixtral", "1f1b"),
        ({"pp": 2, "ep": 2, "tp": 2}, "qwen3_moe", "zero_bubble"),
    ]
    for errors in run_on_copies(8, functools.partial(_compile, runs), _mixtures, runs):
        assert max(errors.values()) < 1e-9, errors
