"""Verification of programs that Inductor compiles: of the functions that it is given."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.inductor import fused
from sp_compiler.passes import simplify


class _Net(nn.Module):
    """In float32, with a loss of its own: half of its numbers are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x)).bfloat16().float()
        return (self.down(y) + x).square().mean()


def test_a_right_program_is_right_in_float64() -> None:
    """Kernels of float32 would read its bytes as numbers of their own dtype."""
    example: Any = ((torch.randn(4, 6, 8),), {})
    with mock.patch.object(fused, "compile_graph", side_effect=AssertionError("compiles")):
        report = sp_compiler.verify(_Net(), tp=2, example_inputs=example, backend="inductor")
    assert report.ok, report
    assert not fused.Fused.runs_as_written


def test_a_wrong_function_is_found() -> None:
    def bent(graph: torch.fx.Graph) -> None:
        simplify.simplify(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
            node.target = torch.ops.aten.relu.default
            node.kwargs = {}

    example: Any = ((torch.randn(4, 6, 8),), {})
    with mock.patch("sp_compiler.compiler.simplify", bent):
        report = sp_compiler.verify(_Net(), tp=2, example_inputs=example, backend="inductor")
    assert not report.ok
