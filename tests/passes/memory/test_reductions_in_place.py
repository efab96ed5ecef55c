"""All-reduces that write into their operands: which do, which do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from sp_compiler.ir.fx import calls
from sp_compiler.ops.convert import CONVERT_IN_PLACE
from sp_compiler.passes.memory.sums_in_place import reduce_in_place
from tests.helpers import parity
from tests.helpers.graph_builder import GraphBuilder, convert, text

aten = torch.ops.aten


def _product(b: GraphBuilder) -> Node:
    return b.call(aten.mm.default, b.input("x", 6, 4), b.input("w", 4, 2), name="mm")


def _reduced(b: GraphBuilder, x: Node, source: str = "P", target: str = "I") -> Node:
    return b.call(convert, x, source, target, 2, name="reduced")


def test_a_product_is_reduced_in_place() -> None:
    """Behind a view too."""
    b = GraphBuilder()
    view = b.call(aten.view.default, _product(b), [2, 3, 2], name="view")
    graph = b.output(_reduced(b, view))
    reduce_in_place(graph)
    assert text(graph) == ["mm = mm(x, w)", "view = view(mm)", "reduced = convert_in_place(view)"]


def test_a_sum_is_reduced_in_place() -> None:
    b = GraphBuilder()
    total = b.call(aten.add.Tensor, b.input("x", 3), b.input("y", 3), name="add")
    graph = b.output(_reduced(b, total, target="R"))
    reduce_in_place(graph)
    assert text(graph) == ["add = add(x, y)", "reduced = convert_in_place(add)"]


def _read_elsewhere(b: GraphBuilder) -> Sequence[Node]:
    product = _product(b)
    return _reduced(b, product), b.call(aten.exp.default, product)


def _returned(b: GraphBuilder) -> Sequence[Node]:
    product = _product(b)
    return _reduced(b, product), product


def _view_read_elsewhere(b: GraphBuilder) -> Sequence[Node]:
    product = _product(b)
    view = b.call(aten.view.default, product, [12])
    return _reduced(b, view), b.call(aten.t.default, product)


def _input(b: GraphBuilder) -> Sequence[Node]:
    return (_reduced(b, b.call(aten.view.default, b.input("x", 6, 4), [24])),)


def _expanded(b: GraphBuilder) -> Sequence[Node]:
    row = b.call(aten.add.Tensor, b.input("x", 1, 4), b.input("y", 1, 4))
    return (_reduced(b, b.call(aten.expand.default, row, [3, 4])),)


def _part(b: GraphBuilder) -> Sequence[Node]:
    return (_reduced(b, b.call(aten.slice.Tensor, _product(b), 0, 0, 3)),)


def _transposed(b: GraphBuilder) -> Sequence[Node]:
    return (_reduced(b, b.call(aten.t.default, _product(b))),)


def _recomputed(b: GraphBuilder) -> Sequence[Node]:
    product = _product(b)
    product.meta["recomputed"] = True
    return (_reduced(b, product),)


def _scattered(b: GraphBuilder) -> Sequence[Node]:
    return (_reduced(b, _product(b), target="S(0)"),)


def _nothing_to_reduce(b: GraphBuilder) -> Sequence[Node]:
    return (_reduced(b, _product(b), "I", "R"),)


def _of_an_operator_of_ours(b: GraphBuilder) -> Sequence[Node]:
    """Which may return what it is given."""
    weight, ids = b.input("w", 4, 3), b.input("ids", 5, dtype=torch.int64)
    rows = b.call(torch.ops.sp_compiler.vocab_embedding.default, weight, ids, 8, 2)
    return (_reduced(b, rows),)


NEAR_MISSES: dict[str, Callable[[GraphBuilder], Sequence[Node]]] = {
    "read elsewhere": _read_elsewhere,
    "returned": _returned,
    "read elsewhere as a view": _view_read_elsewhere,
    "an argument": _input,
    "expanded": _expanded,
    "a part of something larger": _part,
    "in another order": _transposed,
    "a forward value": _recomputed,
    "a reduce-scatter": _scattered,
    "the same numbers": _nothing_to_reduce,
    "of an operator of ours": _of_an_operator_of_ours,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_stays_as_it_is(name: str) -> None:
    b = GraphBuilder()
    graph = b.output(*NEAR_MISSES[name](b))
    before = text(graph)
    reduce_in_place(graph)
    assert text(graph) == before


def _in_place(graph: Graph | None) -> int:
    return 0 if graph is None else len(list(calls(graph, CONVERT_IN_PLACE.overload)))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("eager", {"Prologue": 1, "Block": 4, "Epilogue": 2}), ("inductor", {})],
)
def test_only_code_that_runs_as_generated_reduces_in_place(backend: Any, expected: Any) -> None:
    """Inductor may return one tensor for two equal results."""
    found = parity.case("plain", 2, 8)
    program = parity.compiled(found, tp=2, sequence_parallel=False, backend=backend)
    counts = {
        name: sum(
            map(_in_place, (parts.forward, parts.backward, parts.loss and parts.loss.backward))
        )
        for name, region in program.regions.items()
        for parts in [region.partitioned]
    }
    assert {name: count for name, count in counts.items() if count} == expected
