"""Checkpoints of one grid on any other, bit for bit, with all that training goes on from."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from tests.helpers.grids import split, whole
from tests.helpers.ranks import run_on_copies
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.models import zoo

Flat = dict[str, Tensor]
# By parameter, not by group: stages have other groups.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _model(name: str) -> Any:
    """With a vocabulary that nothing divides, in float32; GPT-2's embedding and head are tied."""
    return zoo.build(name, layers=2, vocab_size=131, dtype=torch.float32)


class _Run:
    """A model and what trains it, on one grid, with stages or without, or on one device."""

    def __init__(self, name: str, axes: dict[str, int], device: str = "cpu") -> None:
        part, parts = 0, 1
        options: dict[str, Any] = {"tp": 1}
        if axes:
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            part, parts = sp_compiler.data_shard(mesh)
            options = {"mesh": mesh}
        with torch.device(device):
            model = _model(name)
        self.batches = [split(zoo.inputs(name, 8, 8, seed), parts)[part] for seed in range(2)]
        self.staged = "pp" in axes
        build: Any = sp_compiler.pipeline if self.staged else sp_compiler.compile
        options |= {"microbatches": 2} if self.staged else {}
        self.module: Any = build(model, example_inputs=((), self.batches[0]), **options)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.position = 0

    def train(self) -> None:
        for batch in self.batches:
            self.loss(batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.position += 8

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Forward and backward."""
        if self.staged:
            result: Tensor = self.module.step(**batch)
            return result
        loss = zoo.loss_of(self.module(**batch))
        loss.backward()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": get_optimizer_state_dict(self._tree, self.optimizer, options=_FLAT),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "position": self.position,
        }

    def load(self, path: Path, *, alone: bool = False) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=str(path), no_dist=alone)
        self.module.load_state_dict(state["model"])
        set_optimizer_state_dict(
            self._tree, self.optimizer, optim_state_dict=state["optimizer"], options=_FLAT
        )
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.position = state["position"]

    def own(self) -> dict[str, Any]:
        """Everything, global, of the stages of this rank."""
        state = self.state()
        tensors = {**state["model"], **state["optimizer"]}
        result = {name: whole(v) for name, v in tensors.items() if isinstance(v, Tensor)}
        rates = {group["lr"] for group in self.optimizer.param_groups}
        return {**result, "rates": rates, "random": state["random"], "position": self.position}

    def full(self) -> dict[str, Any]:
        """The same of all stages."""
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, self.own())
        return {name: value for stage in stages for name, value in stage.items()}

    @property
    def _tree(self) -> torch.nn.Module:
        tree: torch.nn.Module = self.module.module if self.staged else self.module
        return tree


def _assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, Tensor) else None
        assert value == second[name] if same is None else same, name


def _exported(name: str, checkpoint: Path, folder: Path) -> None:
    """The weights of a checkpoint as safetensors, by one process, whatever grid wrote it."""
    model = _model(name)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    weights = {name: value.clone() for name, value in state["model"].items()}
    save_file(weights, folder / "model.safetensors")


def _compile(name: str) -> None:
    """What the grids below need, for their parts of the batch of eight."""
    with shared_programs():
        for rows, settings in (
            (2, {"tp": 2, "schedule": "1f1b"}),
            (8, {"tp": 8}),
            (1, {"schedule": "1f1b"}),
            (2, {"tp": 2, "fsdp": True}),
            (8, {}),
        ):
            compile_for_ranks(_model(name), zoo.inputs(name, rows, 8), **settings)
        with torch.device("meta"):
            model = _model(name)
        compile_for_ranks(model, zoo.inputs(name, 2, 8), tp=2, fsdp=True)


def _on_all_grids(path: str, model: str) -> bool:
    warnings.simplefilter("ignore")
    with shared_programs(only_known=True):
        return _checkpoints(Path(path), model)


def _checkpoints(folder: Path, model: str) -> bool:
    source = _Run(model, {"dp_shard": 2, "pp": 2, "tp": 2})
    source.train()
    true = source.full()
    assert any("exp_avg_sq" in name for name in true)
    dcp.save(source.state(), checkpoint_id=str(folder / "source"))
    dcp.async_save(source.state(), checkpoint_id=str(folder / "async")).result()

    others = [{"tp": 8}, {"dp_shard": 4, "pp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}]
    for axes in others:
        torch.manual_seed(11)  # what is loaded is another state
        other = _Run(model, axes)
        other.load(folder / "source")
        _assert_equal(other.full(), true)
        if "pp" in axes:
            dcp.save(other.state(), checkpoint_id=str(folder / "back"))
    source.train()
    for name in ("back", "async"):
        source.load(folder / name)
        _assert_equal(source.full(), true)

    if dist.get_rank() == 0:
        _exported(model, folder / "source", folder)
    dist.barrier()
    # Without stages rank 0 gets the same weights without a file between.
    weights = other.module.full_state_dict()
    assert bool(weights) == (dist.get_rank() == 0)
    _assert_equal(weights, {name: true[name] for name in weights})

    # Files of HuggingFace: into memory that there is, and into what is on meta.
    for run in (source, other, _Run(model, {"dp_shard": 4, "tp": 2}, "meta")):
        run.module.load_pretrained(folder)
        loaded = {name: whole(value) for name, value in run.module.state_dict().items()}
        _assert_equal(loaded, {name: true[name] for name in loaded})
        assert run.loss(run.batches[0]).isfinite()

    # One device, which is one process. Last, for ranks number their modules alike.
    if dist.get_rank() == 0:
        alone = _Run(model, {})
        alone.load(folder / "source", alone=True)
        _assert_equal(alone.own(), true)
        dcp.save(alone.state(), checkpoint_id=str(folder / "one"), no_dist=True)
    dist.barrier()
    source.load(folder / "one")
    _assert_equal(source.full(), true)
    return True


@pytest.mark.slow
def test_every_grid_loads_every_checkpoint(tmp_path: Path) -> None:
    # Fused projections, biases and tied weights.
    assert all(run_on_copies(8, partial(_compile, "gpt2"), _on_all_grids, str(tmp_path), "gpt2"))
