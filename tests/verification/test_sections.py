"""Calls of a program against their parts of the capture, if blocks pass two values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import sp_compiler
from sp_compiler.base.errors import PassError

aten = torch.ops.aten


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.first(x)), y + torch.tanh(self.second(y))


class _TwoValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        x, y = hidden.sin(), hidden.cos()
        for block in self.blocks:
            x, y = block(x, y)
        return (x * y).square().mean()


@pytest.mark.parametrize("value", [0, 1])
def test_a_wrong_gradient_of_one_of_two_values(value: int) -> None:
    """The forward is right, and so is the gradient of the other value."""

    def without_the_residual(module: GraphModule) -> int:
        # The first two sums are those of the first block.
        sums = list(module.graph.find_nodes(op="call_function", target=aten.add.Tensor))
        node = sums[2 + value]
        with module.graph.inserting_before(node):
            detached = module.graph.call_function(aten.detach.default, (node.args[0],))
        node.args = (detached, node.args[1])
        return 1

    x = torch.randn(4, 8)
    wrong = sp_compiler.compile(_TwoValues(), tp=1, verify=True, passes=[without_the_residual])
    with pytest.raises(PassError, match="gradient of") as refused:
        wrong(x)
    assert refused.value.pass_name == "without_the_residual"


def test_right_gradients_of_two_values() -> None:
    sp_compiler.compile(_TwoValues(), tp=1, verify=True)(torch.randn(4, 8)).backward()
