"""Checkpoints of one grid on any other, bit for bit, with the optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from tests.helpers.grids import split, whole
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

Flat = dict[str, Tensor]


class _Run:
    """A tied GPT-2 with a vocabulary that nothing divides, in float32, on one grid."""

    def __init__(self, axes: dict[str, int], device: str = "cpu") -> None:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        part, parts = sp_compiler.data_shard(mesh)
        with torch.device(device):
            model = zoo.build("gpt2", layers=1, vocab_size=131, dtype=torch.float32)
        self.batches = [split(zoo.inputs("gpt2", 4, 8, seed), parts)[part] for seed in range(2)]
        self.module: Any = sp_compiler.compile(
            model, mesh=mesh, example_inputs=((), self.batches[0])
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)

    def train(self) -> None:
        for batch in self.batches:
            zoo.loss_of(self.module(**batch)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=str(path))
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def full(self) -> Flat:
        """Everything, global."""
        state = self.state()
        result = {name: whole(value) for name, value in state["model"].items()}
        for name, entry in state["optimizer"]["state"].items():
            for key, value in entry.items():
                result[f"{name}.{key}"] = whole(value)
        return result


def _assert_equal(first: Flat, second: Flat) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _on_all_grids(path: str) -> bool:
    warnings.simplefilter("ignore")
    folder = Path(path)
    source = _Run({"dp_shard": 2, "tp": 2})
    source.train()
    true = source.full()
    assert any("exp_avg_sq" in name for name in true)
    dcp.save(source.state(), checkpoint_id=str(folder / "source"))
    dcp.async_save(source.state(), checkpoint_id=str(folder / "async")).result()
    weights = source.module.full_state_dict()
    assert bool(weights) == (dist.get_rank() == 0)
    if weights:
        weights = {name: value.clone() for name, value in weights.items()}
        save_file(weights, folder / "model.safetensors")
    dist.barrier()

    other: dict[str, _Run] = {}
    for name, axes in {
        "tp": {"tp": 4},
        "replicated": {"dp_replicate": 2, "tp": 2},
        "data": {"dp_shard": 4, "tp": 1},
    }.items():
        other[name] = _Run(axes)
        other[name].load(folder / "source")
        _assert_equal(other[name].full(), true)
    source.train()
    dcp.save(other["data"].state(), checkpoint_id=str(folder / "back"))
    for name in ("back", "async"):
        source.load(folder / name)
        _assert_equal(source.full(), true)

    # Files of HuggingFace: into memory that there is, and into what is on meta.
    for run in (source, other["data"], _Run({"dp_shard": 2, "tp": 2}, "meta")):
        if run is not source:
            run.module.load_pretrained(folder)
        loaded = {name: whole(value) for name, value in run.module.state_dict().items()}
        _assert_equal(loaded, {name: true[name] for name in loaded})
        losses = [zoo.loss_of(run.module(**batch)) for batch in run.batches]
        assert all(loss.isfinite() for loss in losses)
        sum(losses).backward()
    return True


@pytest.mark.slow
def test_every_grid_loads_every_checkpoint(tmp_path: Path) -> None:
    assert all(run_on_ranks(4, _on_all_grids, str(tmp_path)))
