"""A block that a later call is the first to use, whose parameters FSDP2 has sharded by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import Block, batch


class _Chosen(nn.Module):
    """Runs one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([Block(0.0), Block(0.0)]).double()

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.blocks[number](x).square().mean()


def _trained() -> None:
    mesh, model = grids.mesh(dp_shard=2, tp=2), _Chosen()
    part, parts = sp_compiler.data_shard(mesh)
    x = batch().chunk(parts)[part]
    module: Any = sp_compiler.compile(_Chosen(), mesh=mesh, example_inputs=((x, 0), {}))
    for one, own in ((module, x), (model, batch())):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in (0, 1, 1, 0, 1):
            one(own, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert grids.parameter_error(module, model) < 1e-12


@pytest.mark.slow
def test_a_block_that_a_later_call_uses_first() -> None:
    run_on_ranks(4, _trained)
