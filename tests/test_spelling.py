"""Operators that are spelled otherwise: the same numbers, and the known operator in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compiler.rewriting import calls, is_getitem
from tests.test_normalize import normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _written(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :2] = x[:, 2:]
    y[:, 2:] = 2.0
    return y


_CASES: list[tuple[Callable[[Tensor], Any], set[str]]] = [
    (lambda x: x.t() * 2, {"transpose.int", "mul.Tensor"}),
    (lambda x: x.type_as(x) * 2, {"mul.Tensor"}),
    (lambda x: x.type_as(torch.ones((), dtype=torch.float32)), {"_to_copy"}),
    (lambda x: x[:1].expand_as(x), {"slice.Tensor", "expand"}),
    (lambda x: x[:, ::2], {"reshape", "select.int"}),
    (lambda x: x[:, 1::2], {"reshape", "select.int"}),
    (lambda x: x[:, ::3], {"slice.Tensor"}),  # 3 does not divide 4
    (lambda x: x[:, 2::2], {"slice.Tensor"}),  # not all of it
    (lambda x: x.repeat(3, 1, 2), {"reshape", "expand"}),
    (lambda x: x.repeat_interleave(2, dim=0), {"reshape", "expand"}),
    (_written, {"zeros", "slice.Tensor", "slice_scatter", "full", "expand"}),
]


@pytest.mark.parametrize(("function", "operators"), _CASES)
def test_same_numbers_by_known_operators(
    function: Callable[[Tensor], Any], operators: set[str]
) -> None:
    x = randn(6, 4, grad=True)
    captured = normalized(function, x)
    torch.testing.assert_close(outputs(captured, x)[0], function(x), rtol=0, atol=0)
    graph = captured.module.graph
    found = {
        node.target._schema.name.split("::")[1] + _overload(node.target._overloadname)
        for node in calls(graph, *(node.target for node in graph.nodes))
        if not is_getitem(node)
    }
    assert found <= operators


_TRANSPOSED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w.T,
    lambda w: w.t(),
    lambda w: w.mT,
    lambda w: w.transpose(0, 1),
    lambda w: w.transpose(-1, 0),
    lambda w: w.permute(1, 0),
    lambda w: w.permute(-1, -2),
]
_NOT_TRANSPOSED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w,
    lambda w: w.transpose(0, 0),
    lambda w: w.permute(0, -1),
    lambda w: w.expand(2, 4, 4).mT,
]


@pytest.mark.parametrize("spell", _TRANSPOSED)
@pytest.mark.parametrize("size", [(3, 4), (2, 3, 4)])
def test_product_with_a_transposed_weight_is_linear(
    spell: Callable[[Tensor], Tensor], size: tuple[int, ...]
) -> None:
    _assert_linear(spell, size, True)


@pytest.mark.parametrize("spell", _NOT_TRANSPOSED)
def test_other_products_stay(spell: Callable[[Tensor], Tensor]) -> None:
    _assert_linear(spell, (2, 3, 4), False)


def test_vector_times_a_transposed_weight_stays() -> None:
    _assert_linear(_TRANSPOSED[0], (4,), False)


def _assert_linear(
    spell: Callable[[Tensor], Tensor], size: tuple[int, ...], expected: bool
) -> None:
    """Of a square weight, so that a transposition too many or too few shows in the numbers."""
    x, w = randn(*size, grad=True), randn(4, 4, grad=True)
    captured = normalized(lambda x, w: x @ spell(w), x, w)
    found = list(calls(captured.module.graph, torch.ops.aten.linear.default))
    assert len(found) == expected
    torch.testing.assert_close(outputs(captured, x, w)[0], x @ spell(w), rtol=1e-14, atol=1e-15)


def _overload(name: str) -> str:
    return "" if name == "default" else f".{name}"


def test_new_tensors_keep_the_type_they_were_captured_with() -> None:
    """Whatever the default type is when the generated code runs."""
    x = randn(3)
    torch.set_default_dtype(torch.float64)
    try:
        captured = normalized(lambda x: x + torch.full((3,), 1e300), x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(outputs(captured, x)[0], x + 1e300, rtol=0, atol=0)


def test_a_tensor_like_an_activation_does_not_depend_on_it() -> None:
    captured = normalized(lambda x: torch.ones_like(x * 2), randn(3, 2, grad=True))
    assert not captured.placeholders
