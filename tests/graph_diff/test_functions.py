"""The graph diff of models with autograd functions, which graphs name by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.graph_diff.diff import diff
from sp_compiler.trace.arguments import ExampleInputs


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class _Doubled(_Scaled):
    pass


class _Model(nn.Module):
    def __init__(self, function: type[_Scaled], factor: float) -> None:
        super().__init__()
        self.linear, self.function, self.factor = nn.Linear(4, 4), function, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x), self.factor)


@pytest.mark.parametrize(
    ("function", "factor", "changed"),
    [(_Scaled, 2.0, False), (_Scaled, 3.0, True), (_Doubled, 2.0, True)],
)
def test_captures_differ_where_the_function_or_its_constants_do(
    function: type[_Scaled], factor: float, changed: bool
) -> None:
    inputs: ExampleInputs = ((torch.randn(2, 4),), {})
    first, second = _Model(_Scaled, 2.0), _Model(function, factor)
    assert diff(first, second, example_inputs=inputs).is_empty != changed
