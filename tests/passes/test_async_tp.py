"""Products that compute while their own rows cross the link."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Interpreter, Node

from sp_compiler.api import plan
from sp_compiler.base.pass_report import PassReport, reporting
from sp_compiler.base.placement import S
from sp_compiler.cost.hardware import H100
from sp_compiler.cost.node_cost import collectives_us, compute_us, elapsed_us, node_collectives
from sp_compiler.cost.step_memory import Room
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ops.async_products import MATMUL_REDUCE_SCATTER
from sp_compiler.ops.communicator import running_on
from sp_compiler.ops.rows import CUT_ROWS, PAD_ROWS
from sp_compiler.passes import async_tp
from sp_compiler.verification.simulate import simulated_ranks
from tests.helpers.async_products import let_all_pay
from tests.helpers.graph_builder import GraphBuilder, convert, text
from tests.helpers.one_operator import join, scatter
from tests.helpers.parity import assert_parity, case
from tests.models import zoo

aten = torch.ops.aten
WORLD, ROWS, WIDTH = 2, async_tp.LEAST_ROWS, 512
AMPLE = Room(forward_bytes=2**40)


class Builder(GraphBuilder):
    """A sublayer under sequence parallelism, in pieces."""

    def gather(self, x: Node, name: str = "full") -> Node:
        return self.call(convert, x, "S(0)", "R", WORLD, name=name)

    def scatter(self, x: Node, name: str = "part") -> Node:
        return self.call(convert, x, "P", "S(0)", WORLD, name=name)

    def linear(self, *args: Node, name: str) -> Node:
        return self.call(aten.linear.default, *args, name=name)


def mlp(rows: int = ROWS, width: int = WIDTH) -> Graph:
    """Two products of what is gathered, one with a bias, and one that is scattered."""
    b = Builder()
    x, bias = b.input("x", rows // WORLD, width), b.input("bias", width)
    up, gate, down = (b.input(name, width, width) for name in ("up", "gate", "down"))
    full = b.gather(x)
    h = b.linear(full, up, bias, name="h")
    g = b.linear(full, gate, name="g")
    y = b.call(aten.mul.Tensor, h, g, name="y")
    return b.output(b.scatter(b.linear(y, down, name="z")), h)


def lowered(
    graph: Graph, room: Room | None = None, backward: Graph | None = None
) -> tuple[Graph, PassReport]:
    parts = Partitioned(graph, backward, num_outputs=1, saved=())
    with reporting(PassReport("async_tp")) as report:
        return async_tp.async_tp(parts, WORLD, None, room, H100).forward, report


def left_alone(graph: Graph, reason: str) -> bool:
    """Whether the graph stays what it was, and ``reason`` is among those that are given."""
    before = str(graph)
    after, report = lowered(graph)
    assert report.rewrites == 0
    assert reason in "\n".join(each.reason for each in report.declined)
    return str(after) == before


def test_an_mlp() -> None:
    graph = mlp()
    before = str(graph)
    after, report = lowered(graph, AMPLE)
    assert text(after) == [
        "up_t = t(up)",
        "gate_t = t(gate)",
        "full_products = all_gather_matmul(x, up_t, gate_t)",
        "h_without_bias = getitem(full_products)",
        "h = add(h_without_bias, bias)",
        "g = getitem(full_products)",
        "y = mul(h, g)",
        "down_t = t(down)",
        "part = matmul_reduce_scatter(y, down_t)",
    ]
    assert (report.rewrites, report.declined) == (2, [])
    assert str(graph) == before


def test_numbers() -> None:
    """On simulated ranks, in float64, as those of the graph that was given."""
    graph = mlp(rows=ROWS, width=8)
    # Too small to pay: by the rewrites themselves.
    for name in ("full", "part"):
        node = next(each for each in graph.nodes if each.name == name)
        graph = async_tp._rewritten(node)
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, 8), (8,), (8, 8), (8, 8), (8, 8)]
    x, bias, up, gate, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    h = x @ up.t() + bias
    expected = (h * (x @ gate.t())) @ down.t()
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with simulated_ranks(WORLD) as tp, running_on(tp):
        parts = [scatter(value, S(0), WORLD, generator) for value in (x, bias, up, gate)]
        part, local_h = Interpreter(module).run(*parts, scatter(down, S(1), WORLD, generator))
    for actual, placement, true in ((part, S(0), expected), (local_h, S(1), h)):
        joined = join(actual, placement, tuple(true.shape))
        torch.testing.assert_close(joined, true, rtol=1e-12, atol=1e-12)


def test_what_else_reads_the_gathered_rows_gets_them() -> None:
    b = Builder()
    x, w = b.input("x", ROWS // WORLD, WIDTH), b.input("w", WIDTH, WIDTH)
    full = b.gather(x)
    h = b.linear(full, w, name="h")
    after, _ = lowered(b.output(b.call(aten.add.Tensor, full, h, name="total")))
    assert text(after)[-3:] == [
        "full = getitem(full_products)",
        "h = getitem(full_products)",
        "total = add(full, h)",
    ]


def test_a_weight_that_is_cast_behind_the_gather() -> None:
    b = Builder()
    x, w = b.input("x", ROWS // WORLD, WIDTH), b.input("w", WIDTH, WIDTH)
    full = b.gather(x)
    cast = b.call(aten.clone.default, w, name="cast")
    after, _ = lowered(b.output(b.linear(full, cast, name="h")))
    assert text(after) == [
        "cast = clone(w)",
        "cast_t = t(cast)",
        "full_products = all_gather_matmul(x, cast_t)",
        "h = getitem(full_products)",
    ]


def test_too_few_rows() -> None:
    assert left_alone(mlp(rows=ROWS - WORLD), f"fewer than {ROWS} rows")


def test_kernels_that_take_longer_than_the_link_saves() -> None:
    """Two columns: nothing to compute while the rows are moved, but a bias to add."""
    b = Builder()
    x, w, bias = b.input("x", ROWS // WORLD, 2), b.input("w", 2, 2), b.input("bias", 2)
    assert left_alone(b.output(b.linear(b.gather(x), w, bias, name="h")), "not take less time")


def _columns(b: Builder) -> Node:
    x, w = b.input("x", ROWS, WIDTH // WORLD), b.input("w", WIDTH, WIDTH)
    return b.linear(b.call(convert, x, "S(1)", "R", WORLD), w, name="h")


def _segments(b: Builder) -> Node:
    x, w = b.input("x", ROWS // WORLD, WIDTH), b.input("w", WIDTH, WIDTH)
    placement = f"S(0|{ROWS // 2},{ROWS // 2})"
    return b.linear(b.call(convert, x, placement, "R", WORLD), w, name="h")


def _vectors(b: Builder) -> Node:
    x, w = b.input("x", ROWS // WORLD, 4, WIDTH), b.input("w", WIDTH, WIDTH)
    return b.linear(b.gather(x), w, name="h")


@pytest.mark.parametrize("made", [_columns, _segments, _vectors])
def test_what_is_not_the_ranks_rows_of_a_matrix(made: Any) -> None:
    b = Builder()
    assert left_alone(b.output(made(b)), "not move the same number of rows of a matrix")


def test_rows_that_are_padded() -> None:
    """As with sizes that are left open, which may not divide by the number of ranks."""
    b = Builder()
    x, w = b.input("x", ROWS // WORLD, WIDTH), b.input("w", WIDTH, WIDTH)
    full = b.call(CUT_ROWS.overload, b.gather(x), ROWS - 1, WORLD)
    z = b.linear(b.linear(full, w, name="h"), w, name="z")
    graph = b.output(b.scatter(b.call(PAD_ROWS.overload, z, WORLD)))
    assert left_alone(graph, "rows are padded")
    _, report = lowered(graph)
    assert len({each.reason for each in report.declined}) == 1


def _right_factor(b: Builder) -> Node:
    x, w = b.input("x", ROWS // WORLD, WIDTH), b.input("w", WIDTH, ROWS)
    return b.call(aten.mm.default, w, b.gather(x), name="h")


def _both_factors(b: Builder) -> Node:
    full = b.gather(b.input("x", ROWS // WORLD, WIDTH))
    return b.linear(full, b.call(aten.exp.default, full), name="h")


def _random_factor(b: Builder) -> Node:
    full = b.gather(b.input("x", ROWS // WORLD, WIDTH))
    noise = b.call(aten.bernoulli.p, b.input("w", WIDTH, WIDTH), 0.5)
    return b.linear(full, noise, name="h")


def _view(b: Builder) -> Node:
    full = b.gather(b.input("x", ROWS // WORLD, WIDTH))
    return b.call(aten.view.default, full, [2, ROWS // 2, WIDTH], name="h")


@pytest.mark.parametrize("made", [_right_factor, _both_factors, _random_factor, _view])
def test_what_is_no_product_of_the_gathered_rows_with_a_weight(made: Any) -> None:
    b = Builder()
    assert left_alone(b.output(made(b)), "no matmul with a weight")


def test_a_sum_that_is_no_product() -> None:
    b = Builder()
    y, w, other = b.input("y", ROWS, WIDTH), b.input("w", WIDTH, WIDTH), b.input("o", ROWS, WIDTH)
    total = b.call(aten.add.Tensor, b.linear(y, w, name="z"), other)
    assert left_alone(b.output(b.scatter(total)), "not the matmul of two matrices")


def test_a_product_that_is_read_before_it_is_summed() -> None:
    b = Builder()
    y, w = b.input("y", ROWS, WIDTH), b.input("w", WIDTH, WIDTH)
    z = b.linear(y, w, name="z")
    assert left_alone(b.output(b.scatter(z), z), "other readers before")


def test_a_collective_that_overlaps_already() -> None:
    """Something else runs beside it: it stays as it is, and nothing is said."""
    b = Builder()
    x, w = b.input("x", ROWS // WORLD, WIDTH), b.input("w", WIDTH, WIDTH)
    started = b.gather(x)
    arrived = b.call(torch.ops.sp_compiler.wait.default, started, WORLD)
    graph = b.output(b.linear(arrived, w, name="h"))
    after, report = lowered(graph)
    assert (str(after), report.declined) == (str(graph), [])


def test_a_peak_that_it_would_raise() -> None:
    """A product that is read late is computed early, beside what is larger in between."""
    b = Builder()
    x, big = b.input("x", ROWS // WORLD, WIDTH), b.input("big", WIDTH, 8 * WIDTH)
    w = b.input("w", WIDTH, 4 * WIDTH)
    full = b.gather(x)
    early = b.call(aten.mm.default, full, big, name="early")
    total = b.call(aten.sum.dim_IntList, early, [1], True, name="total")
    late = b.call(aten.mm.default, full, w, name="late")
    graph = b.output(b.call(aten.mul.Tensor, late, total, name="y"))
    assert left_alone(graph, "would raise peak memory")
    assert lowered(graph, AMPLE)[1].rewrites == 1


@pytest.mark.parametrize(
    ("again", "left", "in_one"),
    [
        (["g"], 0, {"full", "h_without_bias", "part"}),
        (["part"], 1, {"h_without_bias", "g"}),
        (["h", "g", "part"], 2, set()),
        (["full"], 0, {"h_without_bias", "g", "part"}),  # of a gather no numbers depend on the way
    ],
)
def test_what_backward_computes_again(again: list[str], left: int, in_one: set[str]) -> None:
    """It must get the same to the bit, or it would choose other experts than forward."""
    b = Builder()
    for name in again:
        b.call(aten.exp.default, b.input(f"saved_{name}", 1), name=name, recomputed="yes")
    after, report = lowered(mlp(), AMPLE, b.output())
    assert [each.reason for each in report.declined] == [async_tp._RECOMPUTED] * left
    targets = (operator.getitem, MATMUL_REDUCE_SCATTER.overload)
    assert {node.name for node in after.nodes if node.target in targets} == in_one


def test_time() -> None:
    """All but one rank's part of the product runs while the link is busy, or vice versa."""
    for width in (64, 16384):
        b = Builder()
        x, w = b.input("x", ROWS // WORLD, width), b.input("w", width, width)
        factors = [b.call(aten.t.default, w)]
        target = torch.ops.sp_compiler.all_gather_matmul.default
        fused = b.call(target, x, factors, WORLD)
        compute = compute_us(fused, H100)
        link = collectives_us(node_collectives(fused), WORLD, H100)
        assert (compute < link) == (width == 64)
        expected = max(compute, link + compute / WORLD)
        assert elapsed_us(b.output(fused), WORLD, H100) == pytest.approx(expected)


def test_time_of_the_sum() -> None:
    """The parts that have arrived are read once more."""
    b = Builder()
    x, w = b.input("x", ROWS, WIDTH), b.input("w", WIDTH, WIDTH)
    fused = b.call(MATMUL_REDUCE_SCATTER.overload, x, w, WORLD)
    compute = compute_us(fused, H100)
    link = collectives_us(node_collectives(fused), WORLD, H100)
    read = ROWS * WIDTH * x.meta["val"].element_size() / H100.memory_bytes_per_us
    expected = max(compute, link + compute / WORLD) + read
    assert elapsed_us(b.output(fused), WORLD, H100) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in float64, with rows and a link for which every rewrite pays."""
    let_all_pay(monkeypatch)
    program = assert_parity(case(name, 2, 8, p=0.1), tp=2, async_tp=True)
    assert "tp.all_gather_matmul(" in program.code
    assert "tp.matmul_reduce_scatter(" in program.code


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "llama_gqa8"])
def test_what_is_kept_and_its_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_pay(monkeypatch)
    model, inputs = zoo.build(name, layers=1, dtype=torch.bfloat16), zoo.inputs(name, seq=8)
    found, other = (plan(model, ((), inputs), tp=2, async_tp=way) for way in (True, False))
    assert [report.rewrites for report in found.passes if report.name == "async_tp"] == [5]
    assert found.activation_bytes == other.activation_bytes
    assert str(found.activation_formula) == str(other.activation_formula)
