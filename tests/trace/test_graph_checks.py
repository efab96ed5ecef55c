"""Tensors that are not dense are refused where a model is captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.trace.export import capture


class _Graph(nn.Module):
    """A product with the edges of a graph: given, a buffer, or made in forward."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        made = self.edges.to_sparse() if edges is None and x.requires_grad else self.edges
        product: Tensor = (made if edges is None else edges) @ self.linear(x)
        return product


@pytest.mark.parametrize("case", ["input", "buffer", "made"])
def test_sparse_tensors_are_refused_by_name_and_dense_ones_are_not(case: str) -> None:
    dense = torch.eye(3)
    x = torch.randn(3, 4, requires_grad=case == "made")
    model = _Graph(dense.to_sparse() if case == "buffer" else dense)
    args = (x, dense.to_sparse()) if case == "input" else (x,)
    name = {"input": "edges", "buffer": "b_edges", "made": "to_sparse"}[case]
    with pytest.raises(UnsupportedError, match=rf"^{name} .* torch\.sparse_coo.*\n.*module: "):
        capture(model, args)
    captured = capture(_Graph(dense), (x.detach(),))
    assert captured.outputs[0].meta["val"].shape == (3, 4)
