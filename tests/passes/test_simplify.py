"""Local simplifications: each rule, its near-misses, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.rewriting import fake_value
from sp_compiler.passes.simplify import simplify

aten = torch.ops.aten
X, Y, B = torch.randn(6, 4).double(), torch.randn(5, 4).double(), torch.randn(5).double()


def _biased_and_not(product: Tensor, bias: Tensor) -> Tensor:
    return (product + bias) * product


def _viewed_and_not(total: Tensor) -> Tensor:
    return total.view(4) * total


def _joined_and_not(x: Tensor) -> Tensor:
    return torch.cat([x, x.exp()], 1) * torch.cat([x.cos(), x.cos()], 1)


def _of_heads(x: Tensor, heads: int = 2) -> Tensor:
    """(2, 12 or more): three features of each of two heads or more, which lie one behind the
    other."""
    return x.view(2, 3, heads, 2).transpose(1, 2).reshape(2, -1)


# name: function of (X, Y, B), operators that are left in order, the rule that fired.
REWRITES: dict[str, tuple[Callable[..., Tensor], list[str], str]] = {
    "view of view": (
        lambda x, y, b: aten.view(aten.view(x, [3, 8]), [2, 12]),
        ["view"],
        "view_of_view",
    ),
    "view there and back": (
        lambda x, y, b: aten.view(aten.view(x, [24]), [6, 4]).exp(),
        ["exp"],
        "view_of_view",
    ),
    "unsafe view of view": (
        lambda x, y, b: aten._unsafe_view(aten.view(x, [24]), [3, 8]),
        ["view"],
        "view_of_view",
    ),
    "view to the same shape": (lambda x, y, b: aten.view(x, [6, 4]).exp(), ["exp"], "same_shape"),
    "expand to the same shape": (lambda x, y, b: x.expand(6, 4).exp(), ["exp"], "same_shape"),
    "whole slice": (lambda x, y, b: aten.slice(x, 0, 0, 9).exp(), ["exp"], "same_shape"),
    "t of t": (lambda x, y, b: x.t().t().exp(), ["exp"], "double_transpose"),
    "transpose twice, dims named otherwise": (
        lambda x, y, b: x.transpose(0, 1).transpose(-1, -2).exp(),
        ["exp"],
        "double_transpose",
    ),
    "equal views": (
        lambda x, y, b: aten.view(x, [24]) * aten.view(x, [24]),
        ["view", "mul"],
        "merge_equal_views",
    ),
    "sum over kept rows": (
        lambda x, y, b: aten.view(x.sum([0], True), [4]),
        ["sum"],
        "sum_then_squeeze",
    ),
    "bias on a product": (lambda x, y, b: torch.mm(x, y.t()) + b, ["linear"], "fuse_bias"),
    "bias in front": (lambda x, y, b: b + torch.mm(x, y.t()), ["linear"], "fuse_bias"),
    "bias behind a view": (
        lambda x, y, b: torch.mm(x, y.t()).view(2, 3, 5) + b,
        ["linear", "view"],
        "fuse_bias",
    ),
    "bias on a product without transpose": (
        lambda x, y, b: torch.mm(y, x.reshape(4, 6)[:, :5]) + b,
        ["view", "slice", "addmm"],
        "fuse_bias",
    ),
    "product with one": (lambda x, y, b: (x * 1).exp(), ["exp"], "times_one"),
    "quotient by one": (lambda x, y, b: (x / 1.0).t().exp(), ["t", "exp"], "times_one"),
    "power of one": (lambda x, y, b: (x**1).exp(), ["exp"], "times_one"),
    "copy over a part": (
        lambda x, y, b: aten.copy(x.new_zeros(6, 9)[:, :4], x).exp(),
        ["exp"],
        "copy_over",
    ),
    "product with a transpose": (lambda x, y, b: torch.mm(x, y.t()), ["linear"], "linear"),
    "fill behind a mask": (
        lambda x, y, b: x.masked_fill(aten.gt(b[:4], 0), float("-inf")),
        ["slice", "gt", "where"],
        "fill_by_where",
    ),
    "fill behind a part of a mask": (
        lambda x, y, b: x.masked_fill(aten.gt(x.exp(), 1)[:, :1], 1),
        ["exp", "gt", "slice", "where"],
        "fill_by_where",
    ),
    "fill behind a mask for all rows": (
        lambda x, y, b: x.view(2, 3, 4).masked_fill((x[:3] > 0).expand(2, 3, 4), 0.5),
        ["view", "slice", "gt", "expand", "where"],
        "fill_by_where",
    ),
    "heads joined by features": (
        lambda x, y, b: torch.cat([_of_heads(x), _of_heads(x.exp())], 1),
        ["view", "transpose", "exp", "view", "transpose", "cat", "view"],
        "views_behind_cat",
    ),
    "more heads of one than of the other": (
        lambda x, y, b: torch.cat([_of_heads(x), _of_heads(torch.cat([x, x], 1), 4)], -1),
        ["view", "transpose", "cat", "view", "transpose", "cat", "view"],
        "views_behind_cat",
    ),
    "heads joined with features in order": (
        lambda x, y, b: torch.cat([_of_heads(x), aten.view(x.view(2, 2, 3, 2).exp(), [2, 12])], 1),
        ["view", "transpose", "view", "exp", "cat", "view"],
        "views_behind_cat",
    ),
}
NEAR_MISSES: dict[str, Callable[..., Tensor]] = {
    "another permutation": lambda x, y, b: aten.view(x, [2, 3, 4]).transpose(0, 1).transpose(1, 2),
    "real expand": lambda x, y, b: b.expand(6, 5).exp(),
    "product used twice": lambda x, y, b: _biased_and_not(torch.mm(y, y.new_ones(4, 5)), b),
    "bias of another type": lambda x, y, b: torch.mm(y, y.new_ones(4, 5)) + b.to(torch.float32),
    "scaled bias": lambda x, y, b: torch.add(torch.mm(y, y.new_ones(4, 5)), b, alpha=2),
    "scaled product": lambda x, y, b: torch.addmm(b, x, y.t(), alpha=2),
    "scaled summand": lambda x, y, b: torch.addmm(b, x, y.t(), beta=0.5),
    "summand of two dims": lambda x, y, b: torch.addmm(x.new_ones(6, 5), x, y.t()),
    "sum in another type": lambda x, y, b: aten.view(x.sum([0], True, dtype=torch.float32), [4]),
    "another user of the sum": lambda x, y, b: _viewed_and_not(x.sum([0], True)),
    "difference": lambda x, y, b: b - torch.mm(y, y.new_ones(4, 5)),
    "views of two tensors": lambda x, y, b: aten.view(x, [24]) * aten.view(x.exp(), [24]),
    "column, not bias": lambda x, y, b: torch.mm(y, y.new_ones(4, 5)) + b.view(5, 1),
    "sum without its dims": lambda x, y, b: aten.view(x.view(6, 1, 4).sum([0]), [4]),
    "sum whose dim stays": lambda x, y, b: aten.view(x.sum([0], True), [2, 2]),
    "product with another number": lambda x, y, b: (x * 1.5).exp(),
    "product with a tensor": lambda x, y, b: (x * x.new_ones(())).exp(),
    "power of another number": lambda x, y, b: (x**-1).exp(),
    "quotient rounded down": lambda x, y, b: aten.div(x, 1, rounding_mode="floor").exp(),
    "sum with zero, which has no sign": lambda x, y, b: 1 / (x + 0),
    "integers that become floats": lambda x, y, b: (x.long() / 1).exp(),
    "memory for a view": lambda x, y, b: aten.view(b.expand(6, 5) * 1, [30]).exp(),
    "copy of a row over all": lambda x, y, b: aten.copy(x, b[:4]).exp(),
    "copy in another type": lambda x, y, b: aten.copy(x.float(), x).exp(),
    "copy in another order": lambda x, y, b: aten.copy(x, x.view(4, 6).t()).view(24).exp(),
    "copy over a transpose": lambda x, y, b: aten.view(
        aten.copy(x.new_zeros(6, 4).t(), x.view(4, 6)).t(), [24]
    ).exp(),
    "copy that is returned": lambda x, y, b: aten.copy(x.exp(), x),
    "product that is returned": lambda x, y, b: x * 1,
    "product that is returned as a view": lambda x, y, b: (x * 1).t(),
    "fill of integers": lambda x, y, b: x.long().masked_fill(x > 0, 1),
    "fill with a number that no half has": lambda x, y, b: x.half().masked_fill(x > 0, -1e9),
    "fill in another order": lambda x, y, b: x.t().masked_fill(b[:4, None] > 0, 1.0),
    "mask in another order": lambda x, y, b: x.masked_fill((x.view(4, 6) > 0).t(), 1.0),
    "fill with a tensor": lambda x, y, b: x.masked_fill(x > 0, b.sum()),
    "heads joined by rows": lambda x, y, b: torch.cat([_of_heads(x), _of_heads(x.exp())], 0),
    "heads of two widths": lambda x, y, b: torch.cat(
        [_of_heads(x), x.exp().view(2, 3, 4, 1).transpose(1, 2).reshape(2, -1)], 1
    ),
    "features in order": lambda x, y, b: torch.cat([aten.view(x.view(2, 3, 4).exp(), [2, 12])], 1),
    "heads that are read alone too": lambda x, y, b: _joined_and_not(_of_heads(x)),
    "all of them channels last": lambda x, y, b: torch.cat(
        [x.view(2, 2, 2, 3).permute(0, 3, 1, 2).reshape(2, -1)], 1
    ),
    "split of the bias dim": lambda x, y, b: aten.view(torch.mm(y, y.new_ones(4, 10)), [10, 5]) + b,
}


def _names(graph: fx.Graph) -> list[str]:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node.target.__name__.split(".")[0] for node in calls]


def _simplified(graph: fx.Graph) -> PassReport:
    with reporting(PassReport(Pass.SIMPLIFY)) as report:
        simplify(graph)
    return report


@pytest.mark.parametrize("case", REWRITES)
def test_rewrites(case: str) -> None:
    function, expected, rule = REWRITES[case]
    traced = make_fx(function, tracing_mode="fake")(X, Y, B)
    counts = _simplified(traced.graph).kinds
    traced.recompile()
    assert _names(traced.graph) == expected
    assert counts[rule] > 0
    torch.testing.assert_close(traced(X, Y, B), function(X, Y, B), rtol=0, atol=1e-14)
    for node in traced.graph.nodes:
        if node.op == "call_function":
            value = fake_value(node.target, node.args, node.kwargs)
            assert value.shape == node.meta["val"].shape
            assert value.stride() == node.meta["val"].stride()


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay_as_they_are(case: str) -> None:
    traced = make_fx(NEAR_MISSES[case], tracing_mode="fake")(X, Y, B)
    before = str(traced.graph)
    assert _simplified(traced.graph).rewrites == 0
    assert str(traced.graph) == before


@pytest.mark.parametrize("case", REWRITES)
def test_a_second_run_does_nothing(case: str) -> None:
    traced = make_fx(REWRITES[case][0], tracing_mode="fake")(X, Y, B)
    simplify(traced.graph)
    assert _simplified(traced.graph).rewrites == 0
