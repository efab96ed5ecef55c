"""Composite operators: by their parts where all of those have a rule, else whole; open sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.ir.fx import is_getitem
from sp_compiler.passes.normalize import normalize
from sp_compiler.rules.table import has_rule
from sp_compiler.trace.export import capture
from tests.helpers.normalized import Function, normalized, outputs, randn
from tests.helpers.users import compiled, num_compiled


def _operators(function: Callable[[Tensor], Any], x: Tensor) -> set[str]:
    """Operators of the normalized function, whose result is compared with its own."""
    captured = normalized(function, x)
    torch.testing.assert_close(outputs(captured, x)[0], function(x), rtol=0, atol=0)
    called = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    assert all(node.meta["origin"] == "normalize" for node in called if node.meta.get("replaces"))
    return {str(node.target).removeprefix("aten.") for node in called if not is_getitem(node)}


_SPLIT: list[tuple[Callable[[Tensor], Any], set[str]]] = [
    (lambda x: torch.multiply(x, x), {"mul.Tensor"}),
    (lambda x: torch.divide(x, x + 9), {"add.Tensor", "div.Tensor"}),
    (lambda x: torch.subtract(x, x.square()), {"square.default", "sub.Tensor"}),
    (lambda x: torch.special.expit(x), {"sigmoid.default"}),
    (lambda x: torch.special.softmax(x, -1), {"_softmax.default"}),
    (lambda x: torch.greater(x, 0) * x, {"gt.Scalar", "mul.Tensor"}),
    (lambda x: torch.concat([x, x]), {"cat.default"}),
    (lambda x: torch.hstack([x, x]), {"cat.default"}),
    (lambda x: x.tile(2, 3), {"reshape.default", "expand.default"}),
    (
        lambda x: torch.outer(x[0], x[1]),
        {"select.int", "reshape.default", "mul.Tensor"},
    ),
    (
        lambda x: torch.take_along_dim(x, x.argsort(-1), -1),
        {"argsort.stable", "remainder.Scalar", "gather.default"},
    ),
    # Of several results, each of which is an operator of its own.
    (
        lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[1] * 2,
        {"select.int", "reshape.default", "expand.default", "mul.Tensor"},
    ),
]


@pytest.mark.parametrize(("function", "operators"), _SPLIT)
def test_parts_with_rules_take_the_place_of_the_whole(
    function: Callable[[Tensor], Any], operators: set[str]
) -> None:
    assert _operators(function, randn(4, 6, grad=True)) == operators


_WHOLE: list[tuple[Callable[[Tensor], Any], str]] = [
    (F.pdist, "pdist.default"),  # a part has no rule
    (lambda x: F.margin_ranking_loss(x, -x, x.sign()), "margin_ranking_loss.default"),  # writes
]


@pytest.mark.parametrize(("function", "whole"), _WHOLE)
def test_others_stay(function: Callable[[Tensor], Any], whole: str) -> None:
    assert whole in _operators(function, randn(4, 6, grad=True))


def test_equal_calls_are_traced_once_and_replaced_each() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.multiply(torch.multiply(x, x), torch.multiply(x, x))

    x = randn(4, 6, grad=True)
    captured = normalized(function, x)
    nodes = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in nodes] == [torch.ops.aten.mul.Tensor] * 3
    assert all(map(has_rule, nodes))
    assert all(node.meta["requires_grad"] and node.meta["stack_trace"] for node in nodes)


def test_open_sizes_stay_open() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.multiply(torch.hstack([self.linear(x), x.diff(dim=0, append=x[:1])]), 2)

    eager = Model()
    module = compiled(lambda: copy.deepcopy(eager))
    for rows in (3, 5, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), eager(x))
    assert num_compiled(module) == 2


@pytest.mark.filterwarnings("ignore:Raw SymInt value")  # fine in a graph that is not lowered
def test_a_strided_slice_leaves_its_size_open() -> None:
    model = Function(lambda x: x[:, 1::2] * x[:, -4::2].mean())
    captured = capture(model, (randn(2, 8),), open_dims=True)
    normalize(captured)
    assert captured.sizes is not None
    assert captured.sizes.rejection([randn(3, 12)]) is None


def test_an_open_size_of_another_tensor_stays_open() -> None:
    class Packed(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            of_row = torch.repeat_interleave(lengths, lengths, output_size=x.shape[0])
            return x / of_row[:, None]

    captured = capture(Packed(), (randn(5, 4), torch.tensor([2, 3])), open_dims=True)
    normalize(captured)
    targets = [str(node.target) for node in captured.module.graph.nodes]
    assert "aten.repeat_interleave.self_Tensor" in targets
    assert captured.sizes is not None
    captured.sizes.require_known()
