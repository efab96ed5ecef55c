"""Pointwise operators in place: what is rewritten, what is not, numbers and memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import mutates
from sp_compiler.passes import reinplace as reinplacing
from sp_compiler.passes.reinplace import reinplace
from tests.helpers import parity
from tests.helpers.graph_builder import GraphBuilder, convert, text

aten = torch.ops.aten


def rewritten(graph: Graph) -> PassReport:
    """What the pass says of a forward that is ``graph``."""
    with reporting(PassReport(Pass.REINPLACE)) as report:
        reinplace(Partitioned(graph, None, (), 1), "eager")
    return report


def run(graph: Graph) -> list[Tensor]:
    """The results of ``graph`` on random numbers, whose inputs must stay as they are."""
    generator = torch.Generator().manual_seed(0)
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    numbers = [torch.randn(x.shape, generator=generator) for x in values]
    inputs = [
        number > 1 if x.dtype == torch.bool else number.to(x.dtype)
        for x, number in zip(values, numbers, strict=True)
    ]
    before = [x.clone() for x in inputs]
    results = fx.GraphModule({}, graph)(*inputs)
    assert all(map(torch.equal, inputs, before))
    return list(results)


def attention(b: GraphBuilder) -> Node:
    """Scores of a causal attention, their probabilities, and a residual sum."""
    q, k, x = b.input("q", 2, 8, 4), b.input("k", 2, 4, 8), b.input("x", 2, 8, 8)
    mask = b.input("mask", 8, 8, dtype=torch.bool)
    scores = b.call(aten.bmm.default, q, k, name="scores")
    scaled = b.call(aten.mul.Tensor, scores, 0.5, name="scaled")
    masked = b.call(aten.masked_fill.Scalar, scaled, mask, -math.inf, name="masked")
    probs = b.call(aten._softmax.default, masked, -1, False, name="probs")
    return b.call(aten.add.Tensor, x, probs, name="sum_1")


def test_golden_graph() -> None:
    b = GraphBuilder()
    graph = b.output(attention(b))
    expected = run(graph)
    report = rewritten(graph)
    assert text(graph) == [
        "scores = bmm(q, k)",
        "scaled = mul_(scores)",
        "masked = masked_fill_(scaled, mask)",
        "probs = _softmax(masked)",
        "sum_1 = add_(probs, x)",  # the one of the two that is not an input
    ]
    assert (report.rewrites, report.kinds) == (3, {"in place": 3})
    assert all(map(torch.equal, run(graph), expected))


def assert_ends_with(graph: Graph, line: str) -> None:
    """The last operator is rewritten to ``line``, with the same numbers."""
    expected = run(graph)
    rewritten(graph)
    assert text(graph)[-1] == line
    assert all(map(torch.equal, run(graph), expected))


def test_through_views_of_all_of_it() -> None:
    b = GraphBuilder()
    product = b.call(aten.mm.default, b.input("x", 6, 4), b.input("w", 4, 5), name="product")
    rows = b.call(aten.view.default, product, [2, 3, 5], name="rows")
    graph = b.output(b.call(aten.sigmoid.default, rows, name="gate"))
    assert_ends_with(graph, "gate = sigmoid_(rows)")


def test_the_result_of_a_layer() -> None:
    """``linear`` is a composite operator that makes its result."""
    b = GraphBuilder()
    up = b.call(aten.linear.default, b.input("x", 6, 4), b.input("w", 5, 4), name="up")
    graph = b.output(b.call(aten.mul.Tensor, b.input("gate", 6, 5), up, name="gated"))
    assert_ends_with(graph, "gated = mul_(up, gate)")


def test_a_value_times_itself() -> None:
    b = GraphBuilder()
    own = b.call(aten.exp.default, b.input("x", 3), name="own")
    graph = b.output(b.call(aten.mul.Tensor, own, own, name="square"))
    assert_ends_with(graph, "square = mul_(own)")


def _own(b: GraphBuilder, *shape: int, name: str = "x") -> Node:
    return b.call(aten.exp.default, b.input(name, *shape), name=f"own_{name}")


def _input(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.exp.default, b.input("x", 3)),)


def _read_before(b: GraphBuilder) -> Sequence[Node]:
    """Generated code may compute the first reader later, inside of what uses it."""
    own = _own(b, 3)
    early = b.call(aten.sin.default, own)
    return (b.call(aten.neg.default, own), early)


def _read_behind(b: GraphBuilder) -> Sequence[Node]:
    own = _own(b, 3)
    return (b.call(aten.mul.Tensor, own, 2), b.call(aten.sum.default, own))


def _returned(b: GraphBuilder) -> Sequence[Node]:
    own = _own(b, 3)
    return (b.call(aten.mul.Tensor, own, 2), own)


def _a_view_is_read(b: GraphBuilder) -> Sequence[Node]:
    own = _own(b, 3, 3)
    return (b.call(aten.mul.Tensor, own, b.call(aten.t.default, own)),)


def _a_view_is_returned(b: GraphBuilder) -> Sequence[Node]:
    own = _own(b, 4)
    rows = b.call(aten.view.default, own, [2, 2])
    return (b.call(aten.mul.Tensor, own, 2), rows)


def _grows(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.sub.Tensor, _own(b, 1, 3), b.input("y", 4, 3)),)


def _widens(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.sub.Tensor, _own(b, 3), b.input("y", 3, dtype=torch.float64)),)


def _compares(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.gt.Scalar, _own(b, 3), 1),)


def _other_strides(b: GraphBuilder) -> Sequence[Node]:
    columns = b.call(aten.t.default, b.call(aten.exp.default, b.input("x", 3, 4)))
    return (b.call(aten.sub.Tensor, b.input("y", 4, 3), columns),)


def _part(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.mul.Tensor, b.call(aten.slice.Tensor, _own(b, 6, 4), 0, 0, 3), 2),)


def _expanded(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.mul.Tensor, b.call(aten.expand.default, _own(b, 1, 3), [2, 3]), 2),)


def _one_of_several(b: GraphBuilder) -> Sequence[Node]:
    norm = b.call(aten.native_layer_norm.default, b.input("x", 3, 4), [4], None, None, 1.0)
    return (b.call(aten.mul.Tensor, b.call(operator.getitem, norm, 0), 2),)


def _arrived(b: GraphBuilder) -> Sequence[Node]:
    """On one rank a conversion returns what it is given."""
    sent = b.call(convert, _own(b, 6, 4), "P", "S(0)", 2)
    return (b.call(aten.mul.Tensor, sent, 2),)


def _sent(b: GraphBuilder) -> Sequence[Node]:
    own = _own(b, 6, 4)
    return (b.call(aten.mul.Tensor, own, 2), b.call(convert, own, "P", "S(0)", 2))


def _copied(b: GraphBuilder) -> Sequence[Node]:
    """Of a dim of size 1 the code of this copy, ``contiguous()``, returns its operand."""
    turned = b.call(aten.transpose.int, b.input("x", 1, 3), 0, 1)
    copy = b.graph.create_node(
        "call_function", aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
    )
    copy.meta["val"] = turned.meta["val"].contiguous()
    return (b.call(aten.mul.Tensor, copy, 2),)


def _composite(b: GraphBuilder) -> Sequence[Node]:
    """Which returns what it is given, if its numbers are real."""
    same = b.call(aten.dropout.default, b.input("x", 3), 0.5, False)
    return (b.call(aten.mul.Tensor, same, 2),)


def _power_of_a_number(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.pow.Scalar, 2, _own(b, 3)),)


def _scaled_sum(b: GraphBuilder) -> Sequence[Node]:
    total = b.graph.create_node(
        "call_function", aten.add.Tensor, (b.input("y", 3), _own(b, 3)), {"alpha": 2}
    )
    total.meta["val"] = total.args[0].meta["val"]
    return (total,)


def _difference(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.sub.Tensor, b.input("y", 3), _own(b, 3)),)


def _number(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.mul.Tensor, b.call(aten.sum.default, b.input("x", 3)), 2),)


def _numbers_of_rows(b: GraphBuilder) -> Sequence[Node]:
    sums = b.call(aten.sum.dim_IntList, b.input("x", 3, 4), [1], True)
    return (b.call(aten.mul.Tensor, sums, 2),)


def _positions(b: GraphBuilder) -> Sequence[Node]:
    return (b.call(aten.add.Tensor, b.call(aten.arange.default, 4), 1),)


NEAR_MISSES: dict[str, Callable[[GraphBuilder], Sequence[Node]]] = {
    "an input": _input,
    "read before": _read_before,
    "read behind": _read_behind,
    "returned": _returned,
    "a view of it is read": _a_view_is_read,
    "a view of it is returned": _a_view_is_returned,
    "the result has more elements": _grows,
    "the result has another dtype": _widens,
    "a comparison": _compares,
    "the result has other strides": _other_strides,
    "part of a larger one": _part,
    "expanded": _expanded,
    "one of several results": _one_of_several,
    "the result of a collective": _arrived,
    "the operand of a collective": _sent,
    "a copy": _copied,
    "the result of a composite operator": _composite,
    "a number to the power of it": _power_of_a_number,
    "twice the second summand": _scaled_sum,
    "what is subtracted": _difference,
    "a number": _number,
    "a number a row": _numbers_of_rows,
    "positions": _positions,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_stays_as_it_is(name: str) -> None:
    b = GraphBuilder()
    graph = b.output(*NEAR_MISSES[name](b))
    before = text(graph)
    assert rewritten(graph).rewrites == 0
    assert text(graph) == before


def _graphs(program: CompiledProgram) -> Iterator[Graph]:
    for region in program.regions.values():
        yield from region.partitioned.functions.values()


def _in_place(program: CompiledProgram) -> int:
    return sum(mutates(node) for graph in _graphs(program) for node in graph.nodes)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("gpt2", "none"),
        ("llama", "selective"),
        ("plain", "full"),
        pytest.param("t5", "none", marks=pytest.mark.slow),
    ],
)
def test_numbers_are_the_same_to_the_bit(
    name: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = parity.case(name, 2, 8, 0.1)
    options: dict[str, Any] = {"tp": 2, "recompute": recompute, "attention_chunks": 1}
    written = parity.compiled_in_turn(case, **options)
    assert _in_place(written) > 0
    step = parity.simulate(case, written)
    monkeypatch.setattr("sp_compiler.compiler.reinplace", lambda parts, backend: parts)
    apart = parity.compiled_in_turn(case, **options)
    assert _in_place(apart) == 0
    parity.assert_equal_to_the_bit(step.grads, parity.simulate(case, apart).grads)


def test_a_value_that_is_read_elsewhere_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rule is for: where any operand may be overwritten, numbers are others."""
    case = parity.case("llama", 2, 8)
    options: dict[str, Any] = {"tp": 2, "recompute": "none"}
    monkeypatch.setattr(reinplacing, "may_be_overwritten", lambda value: value.op != "placeholder")
    with pytest.raises(AssertionError):
        parity.assert_parity(case, **options)


def test_other_backends_are_given_plain_operators() -> None:
    case = parity.case("llama", 2, 8)
    assert _in_place(parity.compiled(case, tp=2, backend="inductor")) == 0
