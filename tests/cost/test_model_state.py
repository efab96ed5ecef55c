"""What a rank holds of every parameter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.placement import I, R
from sp_compiler.cost.model_state import stored_parameters
from sp_compiler.ir.program import Call, Program, Ref
from tests.helpers.regions import region_of


class _Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


@pytest.mark.parametrize("placements", [*itertools.product((R, I), repeat=2)], ids=str)
def test_one_use_whose_gradient_is_partial_is_enough(placements: tuple[object, ...]) -> None:
    """Of a weight with two uses: in whichever order, its gradient is summed over the ranks."""
    calls = []
    for placement in placements:
        region = region_of(_Scaled(), torch.zeros(3), kinds=["param"], requires_grad=[True])
        region.input_placements = (placement,)  # type: ignore[assignment]
        calls.append(Call(region, "", (Ref("param", "w"),)))
    program = Program(calls, [Ref("call")], pytree.tree_structure(0))
    stored = stored_parameters(program, {"w": I}, 2)
    assert stored["w"].reduced is (R in placements)
