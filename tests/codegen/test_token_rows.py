"""Operators on elements run on the rows that products make, where nothing tells the difference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx import Graph

from sp_compiler.codegen.token_rows import on_token_rows
from tests.helpers.regions import random_inputs, region_of

X = torch.randn(2, 3, 4, dtype=torch.float64)


def before_and_after(module: nn.Module) -> tuple[Graph, Graph]:
    """Also checks that both compute the same, bit by bit."""
    region = region_of(module, X.reshape(6, 4))
    graph = region.module.graph
    for node in graph.nodes:
        if node.target is torch.ops.aten.reshape.default:
            node.target = torch.ops.aten.view.default
    after = on_token_rows(graph)
    after.lint()
    inputs = [x.detach() for x in random_inputs(region)]
    results = [fx.GraphModule({}, each)(*inputs) for each in (graph, after)]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert first.stride() == second.stride()
    return graph, after


def shapes(graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (node.target.__name__.partition(".")[0], tuple(node.meta["val"].shape))
        for node in graph.nodes
        if isinstance(node.meta.get("val"), Tensor) and node.op == "call_function"
    ]


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin().reshape(2, 3, 4)
        y = y * torch.tanh(y + 1.0)
        return y.reshape(6, 4).cos()


def test_elements_are_computed_on_rows() -> None:
    _, after = before_and_after(Rows())
    assert shapes(after) == [(name, (6, 4)) for name in ("sin", "add", "tanh", "mul", "cos")]
    assert shapes(on_token_rows(after)) == shapes(after)  # a second run does nothing


class Broadcast(nn.Module):
    """A mask of another shape."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin().reshape(2, 3, 4)
        return (y * torch.arange(3, dtype=x.dtype).reshape(3, 1)).reshape(6, 4).cos()


class Returned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().reshape(2, 3, 4).cos()


class OtherRows(nn.Module):
    """Rows of another length."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().reshape(3, 4, 2).cos().reshape(6, 4).sin()


class Transposed(nn.Module):
    """A tensor that is not in the order of its elements has another layout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.sin().t().reshape(2, 2, 6)).reshape(4, 6).cos()


class Softmax(nn.Module):
    """Of a dim, not of elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().reshape(2, 3, 4).softmax(1).reshape(6, 4).cos()


class Projections(nn.Module):
    """Parts of a projection, each reshaped by itself."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.sin().reshape(2, 3, 4).split([1, 3], -1)
        return first.reshape(6, 1) * second.reshape(6, 3)


class UsedAsItIs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.sin().reshape(2, 3, 4).split([1, 3], -1)
        return first.reshape(6, 1) * second.exp().reshape(6, 3)


class AlongTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.sin().reshape(2, 3, 4).split([1, 2], 1)
        return first.reshape(2, 1, 2, 2) * second.reshape(2, 2, 2, 2)


@pytest.mark.parametrize(
    "module",
    [Broadcast, Returned, OtherRows, Transposed, Softmax, UsedAsItIs, AlongTokens],
)
def test_near_misses_stay_as_they_are(module: type[nn.Module]) -> None:
    before, after = before_and_after(module())
    assert shapes(after) == shapes(before)


def test_parts_are_cut_from_rows() -> None:
    before, after = before_and_after(Projections())
    (split,) = [node for node in after.nodes if "split" in node.name]
    assert split.args[0].target is torch.ops.aten.sin.default
    assert split.args[1:] == ([1, 3], -1)
    assert [tuple(part.shape) for part in split.meta["val"]] == [(6, 1), (6, 3)]
    assert [tuple(part.meta["val"].shape) for part in split.users] == [(6, 1), (6, 3)]
    assert len(shapes(after)) == len(shapes(before)) - 3  # the views
