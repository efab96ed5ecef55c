"""What is read from operators' schemas: whose memory a result has, and what is written."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sp_compiler.ir.op_traits import base, is_pure_view, is_view, writes
from tests.helpers.graph_builder import GraphBuilder

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "args", "view", "written"),
    [
        (aten.exp.default, (), False, False),
        (aten.t.default, (), True, False),
        (aten.mul_.Tensor, (2,), True, True),
        (aten.masked_fill.Scalar, ("mask", 0.0), False, False),
        (aten.masked_fill_.Scalar, ("mask", 0.0), True, True),
    ],
)
def test_results_in_the_memory_of_an_operand(
    target: Any, args: tuple[Any, ...], view: bool, written: bool
) -> None:
    b = GraphBuilder()
    x, mask = b.input("x", 3, 3), b.input("mask", 3, 3, dtype=torch.bool)
    node = b.call(target, x, *(mask if each == "mask" else each for each in args))
    assert (is_view(node), writes(node)) == (view, written)
    assert is_pure_view(node) == (view and not written)
    assert base(node) is (x if view else node)


def test_a_part_of_a_split_is_in_its_memory() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 3)
    part = b.call(operator.getitem, b.call(aten.split.Tensor, x, 2), 1)
    assert base(part) is x


@pytest.fixture
def counts() -> Iterator[Any]:
    """A user's operator, which writes into its argument and returns a tensor of its own."""
    with torch.library._scoped_library("of_a_user", "FRAGMENT") as library:
        library.define("count(Tensor(a!) counts, Tensor x) -> Tensor")
        library.impl("count", lambda counts, x: x.new_empty(x.shape), "Meta")
        yield torch.ops.of_a_user.count.default


def test_a_result_beside_what_is_written(counts: Any) -> None:
    b = GraphBuilder()
    node = b.call(counts, b.input("counts", 3), b.input("x", 3))
    assert not is_view(node)
    assert base(node) is node
