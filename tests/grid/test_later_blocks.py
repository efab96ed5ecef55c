"""A block that a later call is the first to use, whose parameters FSDP2 has sharded by then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sp_compiler
from tests.helpers import expert_models, grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import Block, batch


class _Chosen(nn.Module):
    """Runs one of its blocks, or all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([Block(0.0) for _ in range(3)]).double()

    def forward(self, x: Tensor, number: int) -> Tensor:
        for index in ((0,), (1,), (1, 0, 2))[number]:
            x = self.blocks[index](x)
        return x.square().mean()


class _ChosenExperts(nn.Module):
    """Runs one of its layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        experts = [expert_models.Layer(expert_models.Picked()) for _ in range(2)]
        self.blocks = nn.ModuleList(experts).double()

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.blocks[number](x).square().mean()


def _trained() -> None:
    _follow(_Chosen, batch(), (0, 1, 2, 0, 2, 1), dp_shard=2, tp=2)


def _experts_trained() -> None:
    torch.manual_seed(1)
    x = torch.randn(8, expert_models.HIDDEN, dtype=torch.float64)
    module = _follow(_ChosenExperts, x, (0, 1, 1, 0, 1), ep=2, tp=1)
    first, second = (grids.local(block.experts.up).shape for block in module.blocks)
    assert first[0] == second[0] == 2  # of four: one divided over "ep", the other by FSDP2
    assert list(module.plan.collectives) == []


def _follow(make: Any, x: Tensor, numbers: Sequence[int], **axes: int) -> Any:
    """Train the module and the model on calls of these blocks, first without gradients."""
    mesh, model = grids.mesh(**axes), make()
    part, parts = sp_compiler.data_shard(mesh)
    own = x.chunk(parts)[part]
    module: Any = sp_compiler.compile(make(), mesh=mesh, example_inputs=((own, 0), {}))
    for _ in range(2):  # compiled, and found
        with torch.no_grad():
            loss = module(own, 1)
        dist.all_reduce(loss)
        assert abs(loss / dist.get_world_size() - model(x, 1)) < 1e-12
    for one, batch_of_one in ((module, own), (model, x)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in numbers:
            one(batch_of_one, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert grids.parameter_error(module, model) < 1e-12
    return module


@pytest.mark.slow
def test_a_block_that_a_later_call_uses_first() -> None:
    run_on_ranks(4, _trained)


@pytest.mark.slow
def test_experts_that_a_later_call_uses_first() -> None:
    """They stay whole, as FSDP2 shards them: of half of them no rank computed the others' rows."""
    run_on_ranks(2, _experts_trained)
