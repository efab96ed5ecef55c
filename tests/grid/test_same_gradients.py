"""Gradients of one parameter on one rank and of another one on the other are not added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import sp_compiler
from sp_compiler import RankMismatchError
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import batch


class _Forked(nn.Module):
    """Goes one of two ways, whose parameters have equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.ones(8).double()) for _ in range(2))

    def forward(self, x: Tensor, to_the_left: bool) -> Tensor:
        return (x * (self.left if to_the_left else self.right)).square().mean()


def _ways() -> None:
    """An error on all ranks; then both ways on all of them. Also where users apply FSDP2."""
    for data, by_hand in (("dp_shard", False), ("dp_shard", True), ("dp_replicate", False)):
        mesh, model = grids.mesh(**{data: 2, "tp": 1}), _Forked()
        part, parts = sp_compiler.data_shard(mesh)
        x = batch().chunk(parts)[part]
        module: Any = sp_compiler.compile(
            _Forked(), mesh=mesh, example_inputs=((x, True), {}), fsdp=not by_hand
        )
        if by_hand:
            fully_shard(module, mesh=mesh[data])
        found = r"left has (a|no) gradient on this .*\(2 parameters.*dummy input"
        with pytest.raises(RankMismatchError, match=found):
            module(x, part == 0).backward()
        module.zero_grad()
        for one, own in ((module, x), (model, batch())):
            for way in (True, False):
                one(own, way).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(grids.whole(parameter.grad), model.get_parameter(name).grad)


@pytest.mark.slow
def test_parts_of_the_data_that_go_different_ways() -> None:
    run_on_ranks(2, _ways)
