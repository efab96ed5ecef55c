"""Normalization: the same numbers, in the one form that later passes know."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.ir.fx import arguments, calls, is_call
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers import parity
from tests.helpers.normalized import body, normalized, outputs, randn, text
from tests.helpers.slow import slow
from tests.models import zoo
from tests.trace.test_export import largest_error, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten
sp = torch.ops.sp_compiler


# Of variants one is fast.
@pytest.mark.parametrize(
    "name", zoo.cases("gpt2", "llama", "bert", "vit", "plain_unfused", "encoder", "lora")
)
def test_normalized_zoo_equals_eager(name: str) -> None:
    model, kwargs = zoo.build(name), zoo.inputs(name)
    captured = capture(model, (), kwargs)
    normalize(captured)
    loss = zoo.loss_of(run(captured, model, **kwargs).outputs)
    expected = zoo.loss_of(model(**kwargs))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert largest_error(model, expected, loss) < 1e-13


@pytest.mark.parametrize(
    ("dropout", "name"),
    [
        *itertools.product(("regenerate", "stored"), ("gpt2", "encoder_causal", "vit")),
        slow("regenerate", "t5"),
    ],
)
def test_normal_form(name: str, dropout: Any) -> None:
    """The invariants afterwards, and that a second run changes nothing."""
    captured = capture(zoo.build(name, dropout=0.1), (), zoo.inputs(name))
    normalize(captured, dropout=dropout)
    graph = captured.module.graph
    for node in calls(graph, *(node.target for node in graph.nodes)):
        assert node.meta["val"] is not None
        assert isinstance(node.meta["requires_grad"], bool)
        if node.target is operator.getitem:
            continue
        assert not node.target._schema.is_mutable
        bound = arguments(node)
        dims = [bound.get(key) for key in ("dim", "dim0", "dim1")]
        if node.target.namespace == "aten":
            assert all(dim < 0 for dim in dims if isinstance(dim, int))
        assert not is_call(node, aten.scaled_dot_product_attention.default)
        assert bound.get("bias") is None or not is_call(node, aten.linear.default)
    assert captured.refs[-1].kind == "seed"
    before = text(captured)
    normalize(captured, dropout=dropout)
    assert text(captured) == before


def test_copies_casts_and_views() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.contiguous().to(torch.float64).clone().flatten(1).view(2, -1, 3)
        return y.to(torch.float32).squeeze(1).detach() + x.detach().sum()

    assert "\n".join(body(normalized(function, randn(2, 3, 4, grad=True)))) == "\n".join(
        [
            "%1 = aten.reshape(%0, [2, 4, 3]) : f64[2, 4, 3]",
            "%2 = aten._to_copy(%1, dtype=torch.float32) : f32[2, 4, 3]",
            "%3 = aten.detach(%2) : f32[2, 4, 3]",
            "%4 = aten.detach(%0) : f64[2, 3, 4]",
            "%5 = aten.sum(%4) : f64[]",
            "%6 = aten.add.Tensor(%3, %5) : f32[2, 4, 3]",
            "output(%6)",
        ]
    )


def test_splits_slices_and_dims() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, dim=2)
        third, _ = x.split(4, dim=2)
        part = x[:, -2:, :4].softmax(1) + x[:, :, :4].sum([0, 1], keepdim=True)
        return torch.cat([first, second, third]).transpose(
            0, 1
        ), part.t() if part.ndim == 2 else part

    assert body(normalized(function, randn(2, 3, 8))) == [
        "%1 = aten.split_with_sizes(%0, [4, 4], -1) : (f64[2, 3, 4], f64[2, 3, 4])",
        "%2 = getitem(%1, 0) : f64[2, 3, 4]",
        "%3 = getitem(%1, 1) : f64[2, 3, 4]",
        "%4 = aten.split_with_sizes(%0, [4, 4], -1) : (f64[2, 3, 4], f64[2, 3, 4])",
        "%5 = getitem(%4, 0) : f64[2, 3, 4]",
        "%6 = aten.slice.Tensor(%0, -2, 1, 3) : f64[2, 2, 8]",
        "%7 = aten.slice.Tensor(%6, -1, 0, 4) : f64[2, 2, 4]",
        "%8 = aten.softmax.int(%7, -2) : f64[2, 2, 4]",
        "%9 = aten.slice.Tensor(%0, -1, 0, 4) : f64[2, 3, 4]",
        "%10 = aten.sum.dim_IntList(%9, [-3, -2], True) : f64[1, 1, 4]",
        "%11 = aten.add.Tensor(%8, %10) : f64[2, 2, 4]",
        "%12 = aten.cat([%2, %3, %5], -3) : f64[6, 3, 4]",
        "%13 = aten.transpose.int(%12, -3, -2) : f64[3, 6, 4]",
        "output(%13, %11)",
    ]


def test_bias_is_added_by_its_own_node() -> None:
    args = randn(2, 3, 4), randn(5, 4), randn(5)
    captured = normalized(F.linear, *args)
    assert body(captured) == [
        "%3 = aten.linear(%0, %1) : f64[2, 3, 5]",
        "%4 = aten.add.Tensor(%3, %2) : f64[2, 3, 5]",
        "output(%4)",
    ]
    torch.testing.assert_close(outputs(captured, *args)[0], F.linear(*args), rtol=1e-14, atol=1e-14)


def test_addmm_on_flattened_rows_becomes_a_product_of_the_whole() -> None:
    def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x.view(-1, 4), weight).view(2, 3, 5)

    args = randn(2, 3, 4), randn(4, 5), randn(5)
    captured = normalized(conv1d, *args)
    assert body(captured) == [
        "%3 = aten.matmul(%0, %1) : f64[2, 3, 5]",
        "%4 = aten.add.Tensor(%3, %2) : f64[2, 3, 5]",
        "output(%4)",
    ]
    torch.testing.assert_close(outputs(captured, *args)[0], conv1d(*args), rtol=1e-14, atol=1e-14)


def test_addmm_keeps_rows_that_another_value_uses() -> None:
    def near_miss(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.addmm(bias, x.view(-1, 4), weight)
        return rows.view(2, 3, 5), rows.view(3, 2, 5)

    captured = normalized(near_miss, randn(2, 3, 4), randn(4, 5), randn(5))
    assert body(captured)[:3] == [
        "%3 = aten.reshape(%0, [6, 4]) : f64[6, 4]",
        "%4 = aten.matmul(%3, %1) : f64[6, 5]",
        "%5 = aten.add.Tensor(%4, %2) : f64[6, 5]",
    ]


@pytest.mark.parametrize(
    "near_miss",
    [
        # The bias counts three times; there are two matrices; the weight is a vector.
        lambda x, w, b: torch.add(x.view(-1, 4) @ w[0], b, alpha=3).view(2, 3, 5),
        lambda x, w, b: torch.matmul(x.view(-1, 4), w).view(2, 2, 3, 5) + b,
        lambda x, w, b: torch.matmul(x.view(-1, 4), w[0, :, 0]).view(1, 1, 6) * b[0],
    ],
)
def test_flattened_rows_stay_where_the_product_is_another(near_miss: Any) -> None:
    args = randn(2, 3, 4), randn(2, 4, 5), randn(5)
    captured = normalized(near_miss, *args)
    assert body(captured)[0] == "%3 = aten.reshape(%0, [6, 4]) : f64[6, 4]"
    assert "aten.matmul(%3, " in text(captured)
    torch.testing.assert_close(
        outputs(captured, *args)[0], near_miss(*args), rtol=1e-14, atol=1e-14
    )


def test_scaled_addmm_is_left_alone() -> None:
    def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight, alpha=2)

    captured = normalized(scaled, randn(3, 4), randn(4, 5), randn(5))
    assert body(captured)[0].startswith("%3 = aten.addmm(")


@pytest.mark.parametrize("size", [(1, 3, 4), (3, 4), (1, 3, 1)])
def test_operand_without_batch_is_expanded(size: tuple[int, ...]) -> None:
    captured = normalized(torch.add, randn(2, 3, 4), randn(*size))
    wide = [2, 3, size[-1]]
    assert body(captured)[0].startswith(f"%2 = aten.expand(%1, {wide})")


def test_what_two_operators_read_is_expanded_once() -> None:
    def twice(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, torch.where(mask, x, 2.0).exp(), 0.0)

    captured = normalized(twice, randn(2, 3, 4), randn(3, 4) > 0)
    assert text(captured).count("aten.expand(") == 1


@pytest.mark.parametrize("size", [(4,), (2, 1, 4), (1, 1, 4), ()])
def test_other_broadcasts_stay(size: tuple[int, ...]) -> None:
    captured = normalized(torch.add, randn(2, 3, 4), randn(*size))
    assert body(captured)[0] == "%2 = aten.add.Tensor(%0, %1) : f64[2, 3, 4]"


def test_a_pointwise_operator_with_two_results() -> None:
    class Exponents(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y * torch.frexp(y.detach()).exponent).sum()

    torch.manual_seed(0)
    case = parity.make_case(Exponents(4, 8).double(), {"x": randn(2, 6, 4)})
    parity.assert_parity(case, tp=2)


def test_a_slice_of_one_of_several_results() -> None:
    args = randn(2, 3, 4), randn(5, 4)
    captured = normalized(lambda x, w: F.linear(x, w).topk(2, 1).values[:, -1:], *args)
    assert body(captured)[-2].startswith("%5 = aten.slice.Tensor(%4")


def test_a_slice_behind_a_product_of_a_value_with_itself_stays() -> None:
    """The second factor would keep all rows, and broadcast the first."""
    args = randn(2, 3, 4), randn(5, 4)

    def last_squared(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x.tanh(), w)
        return (y * y)[:, -1:].sum()

    captured = normalized(last_squared, *args)
    assert [line.split(" = ")[-1].split("(")[0] for line in body(captured)[:4]] == [
        "aten.tanh",
        "aten.linear",
        "aten.mul.Tensor",
        "aten.slice.Tensor",
    ]
    torch.testing.assert_close(outputs(captured, *args)[0], last_squared(*args), rtol=1e-14, atol=0)


def test_a_slice_behind_products_with_a_vector_stays() -> None:
    """Its dim is another one of the rows before the product, which have one dim more."""
    args = randn(4, 6, 4), randn(4)

    def first(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.tanh(), w)[:3]

    captured = normalized(first, *args)
    torch.testing.assert_close(outputs(captured, *args)[0], first(*args), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("returned", "copied"),
    [
        (lambda x, y: (y.clone(),), set()),  # nobody else has it
        (lambda x, y: (y, y.view(-1), x[0]), set()),  # shared in eager code, too
        (lambda x, y: (x.contiguous(), y), set()),  # the input itself
        (lambda x, y: (y[:, ::2].contiguous(), (y * 2).clone()), set()),
        (lambda x, y: (y, y.clone()), {1}),
        (lambda x, y: (y.clone()[0], 3, y.mT), {0}),
        (lambda x, y: (x.clone().view(-1), y), {0}),
        (lambda x, y: (y, x.mT.contiguous(), x.mT.clone()), {1, 2}),
    ],
)
def test_outputs_that_only_a_copy_keeps_apart(
    returned: Callable[[Tensor, Tensor], tuple[Any, ...]], copied: set[int]
) -> None:
    captured = normalized(lambda x: returned(x, x.tanh()), randn(3, 4))
    assert captured.copied == copied
    normalize(captured)  # again: the graph has no copies any more
    assert captured.copied == copied
