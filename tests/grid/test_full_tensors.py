"""Full weights and full optimizer state, loaded by torch's functions beside FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import sp_compiler
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import WIDTH, batch

# Not a multiple of the ranks, on either axis.
_ODD = 7


class _Gated(nn.Module):
    """Two halves of one weight, and a width that the ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, _ODD)
        self.back = nn.Linear(_ODD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fused(x).chunk(2, -1)
        x = x + self.down(F.silu(gate) * value)
        return (x + self.back(torch.tanh(self.odd(x)))).square().mean()


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On one device."""
    torch.manual_seed(seed)
    model = _Gated().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-6)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(4, seed=step)).backward()
        optimizer.step()
    return model, optimizer


def _loaded(*, broadcast: bool) -> None:
    mesh = grids.mesh(dp_shard=2, tp=2)
    part, parts = sp_compiler.data_shard(mesh)
    torch.manual_seed(3)
    module: Any = sp_compiler.compile(
        _Gated().double(),
        mesh=mesh,
        example_inputs=((batch(4).chunk(parts)[part],), {}),
        hints={"fused": Shard(0), "odd": Shard(0)},
    )
    assert "segments=" in str(module.fused.weight.placements)
    assert len(module.odd.weight.placements) == 2
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-6)
    true, true_optimizer = _trained(1)
    # Copies, since torch keeps what it loads: both would count the same steps.
    moments = copy.deepcopy(get_optimizer_state_dict(true, true_optimizer))
    weights = copy.deepcopy(true.state_dict())
    if broadcast and dist.get_rank():
        weights, moments = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(module, weights, options=options)
    set_optimizer_state_dict(module, optimizer, moments, options=options)
    assert grids.parameter_error(module, true) == 0
    for step in range(2, 4):
        for one, steps, x in (
            (module, optimizer, batch(4, seed=step).chunk(parts)[part]),
            (true, true_optimizer, batch(4, seed=step)),
        ):
            steps.zero_grad()
            one(x).backward()
            steps.step()
    assert grids.parameter_error(module, true) < 1e-9


def _both_ways() -> None:
    for broadcast in (False, True):
        _loaded(broadcast=broadcast)


@pytest.mark.slow
def test_full_tensors_on_data_axes() -> None:
    run_on_ranks(4, _both_ways)
