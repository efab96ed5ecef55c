"""Resuming with torch.distributed.checkpoint where a parameter never got a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sp_compiler


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


def _started(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = sp_compiler.compile(_Net(), tp=1, example_inputs=((torch.ones(2, 4),), {}))
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def _losses(module: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = module(torch.ones(2, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore")  # of torch, about the lack of a process group
def test_as_the_page_of_checkpoints_says(tmp_path: Path) -> None:
    module, optimizer = _started(0)
    _losses(module, optimizer)
    weights, moments = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
    expected = _losses(module, optimizer)

    module, optimizer = _started(1)
    weights, moments = get_state_dict(module, optimizer)
    state = {"model": weights, "optimizer": moments}
    with pytest.raises(CheckpointException, match=r"Missing key.*optimizer\.state"):
        dcp.load(state, checkpoint_id=tmp_path)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert _losses(module, optimizer) == expected
