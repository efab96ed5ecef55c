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
from tests.helpers.normalized import Function, OfWeights, normalized, outputs, randn, text
from tests.helpers.users import assert_same_gradients, compiled, num_compiled


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


_ROWS = torch.tensor([True, False, True])
_PLACES = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
# name: a write into (3, 4, 5) numbers of one value, which has no dim of the rows that it fills.
_WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row": lambda x, w: x.index_put((_PLACES,), w[0]),
    "a row, by its rank": lambda x, w: x.index_put((_PLACES,), w[:1]),
    "a number": lambda x, w: x.index_put((_PLACES,), w[0, 0]),
    "one number in each row": lambda x, w: x.index_put((_ROWS,), w[:, :1]),
    "rows of several": lambda x, w: x.index_put((_ROWS,), w),
    "rows, with a dim for them": lambda x, w: x.index_put((_ROWS,), w[None]),
    "single elements": lambda x, w: x.index_put((x > 0,), w[0, 0]),
    "added": lambda x, w: x.index_put((_PLACES,), w[0], accumulate=True),
    "behind a dim": lambda x, w: torch.ops.aten.index_put(x, [None, _PLACES[0]], w[0]),
    "behind a dim that it has": lambda x, w: torch.ops.aten.index_put(
        x, [None, _PLACES[0]], w[:3, None]
    ),
    "before a dim": lambda x, w: torch.ops.aten.index_put(x, [_ROWS, None], w),
}


@pytest.mark.parametrize("name", _WRITES)
def test_one_value_is_written_by_where(name: str) -> None:
    """The gradient of the value would have as many rows as the mask selects."""
    write = _WRITES[name]
    x, weights = randn(3, 4, 5, grad=True), randn(4, 5, grad=True)
    captured = normalized(write, x, weights)
    assert "index_put" not in text(captured)
    found, expected = outputs(captured, x, weights)[0], write(x, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    tangent = randn(3, 4, 5)
    for grad, true in zip(
        torch.autograd.grad(found, (x, weights), tangent),
        torch.autograd.grad(expected, (x, weights), tangent),
        strict=True,
    ):
        torch.testing.assert_close(grad, true, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, w: x.index_put((_ROWS,), torch.stack([w, 2 * w])),  # a row each
        lambda x, w: x.index_put((torch.tensor([0, 2]),), w),
        lambda x, w: torch.ops.aten.index_put(x, [_ROWS, torch.tensor([0, 1])], w[0]),
        lambda x, w: (x > 0).index_put((_ROWS,), torch.tensor(True), accumulate=True) * w,
    ],
)
def test_other_writes_stay(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert "index_put" in text(normalized(write, randn(3, 4, 5, grad=True), randn(4, 5, grad=True)))


def test_a_model_that_masks_with_a_trained_vector() -> None:
    model = OfWeights(lambda x, keep, w: (x * 2).index_put((keep,), w).square(), torch.ones(5))
    eager = copy.deepcopy(model.double())
    module, x = compiled(lambda: model), randn(3, 4, 5)
    for each in (eager, module):
        each(x, _PLACES).sum().backward()
    assert_same_gradients(module, eager)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sgn(x) * x,
        lambda x: x[:, :0][:, 5::2],
        lambda x: x.logsumexp([], keepdim=True),
    ],
    ids=["sign", "step through nothing", "over no dims"],
)
def test_rare_forms(function: Callable[[Tensor], Tensor]) -> None:
    x, same = randn(3, 4, grad=True), randn(3, 4, grad=True)
    module = compiled(lambda: OfWeights(lambda y, w: function(y * w), torch.ones(4).double()))
    found, expected = module(x), function(same * 1)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-14, atol=1e-14)
