"""The loss among the outputs of a program, and the parameters that its calls share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.ir.program import Call, Program, Ref, loss_position
from sp_compiler.options import CompileOptions
from sp_compiler.passes.memory.partition_options import partition_options
from tests.helpers.regions import region_of


class _Parts(nn.Module):
    """Two scalars and a vector."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.square().mean(), x.sum(), x * 2


def _program(structure: Any) -> Program:
    region = region_of(_Parts(), torch.zeros(3), kinds=["param"], requires_grad=[True])
    for node in region.outputs:
        node.meta["requires_grad"] = True
    outputs = [Ref("call", output=index) for index in range(3)]
    return Program(
        [Call(region, "", (Ref("param", "x"),))], outputs, pytree.tree_structure(structure)
    )


@pytest.mark.parametrize(
    ("structure", "position"),
    [
        ({"aux": 0, "loss": 0, "y": 0}, 1),
        ((0, 0, 0), 0),
        ({"a": 0, "b": 0, "loss": 0}, 0),  # what is called so is a vector
    ],
)
def test_loss_is_the_scalar_of_that_name_or_the_first(structure: Any, position: int) -> None:
    program = _program(structure)
    assert program.loss == program.outputs[position]
    (options,) = partition_options(program, CompileOptions(tp=1)).values()
    assert options.loss_output == position


def test_one_scalar_needs_no_name() -> None:
    class Refusing(dict[str, Tensor]):
        """A result that checks its values."""

    def unflatten(values: Any, context: Any) -> Refusing:
        raise AssertionError("positions are no tensors")

    pytree.register_pytree_node(Refusing, lambda result: ([*result.values()], None), unflatten)
    spec = pytree.tree_structure(Refusing(y=torch.zeros(2), total=torch.zeros(())))
    assert loss_position(spec, [1]) == 1
    assert loss_position(spec, []) is None
    with pytest.raises(AssertionError, match="positions are no tensors"):
        loss_position(spec, [0, 1])


@pytest.mark.parametrize(("names", "own"), [(["x", "y"], [{0}, {0}]), (["x", "x"], [set(), set()])])
def test_a_gradient_to_which_another_call_adds_is_not_final(
    names: list[str], own: list[set[int]]
) -> None:
    (call,) = _program((0, 0, 0)).calls
    calls = [Call(call.region, "", (Ref("param", name),)) for name in names]
    program = Program(calls, [Ref("call")], pytree.tree_structure(0))
    assert program.own_parameters(1) == own
