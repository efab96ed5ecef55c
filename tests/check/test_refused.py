"""Operators that the check cannot prove run replicated: slower, noted, and correct."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler import compiler
from sp_compiler.base.errors import PlacementError
from sp_compiler.check import check_partitioned
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.program import Region
from tests.helpers import parity

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class TwiceUsed(nn.Module):
    """The gradient of ``gelu`` is a sum that is no operator of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(x))
        return self.down(hidden * torch.tanh(hidden))


def test_the_nearest_operator_of_a_refused_sum_runs_replicated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []

    def check(region: Region, partitioned: Partitioned, *rest: Any) -> object:
        for node in partitioned.backward.nodes if partitioned.backward else ():
            is_sum = node.target is torch.ops.aten.add.Tensor and len(node.all_input_nodes) == 2
            if is_sum and len(refused) < 2:
                for key in ("source", "root"):
                    node.meta.pop(key, None)
                refused.append(node.name)
                raise PlacementError("check", "not proven", node)
        return check_partitioned(region, partitioned, *rest)

    monkeypatch.setattr(compiler, "check_partitioned", check)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    compiled = parity.assert_parity(parity.make_case(TwiceUsed().double(), {"x": x}), tp=2)
    assert len(set(compiled.replicated)) == len(refused) == 2
    assert sum("runs replicated" in note for note in compiled.notes) == 2
