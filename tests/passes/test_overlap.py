"""Overlap of backward with its collectives: order, waits, numbers."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from sp_compiler.base.placement import R, S
from sp_compiler.check.derive import derive
from sp_compiler.cost.hardware import H100, collective_us
from sp_compiler.cost.memory import backward_peak_bytes
from sp_compiler.cost.node_cost import compute_us, elapsed_us, node_collectives
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.op_traits import is_wait
from sp_compiler.ops.accumulate import ADD_PRODUCT
from sp_compiler.passes.overlap.orders import overlapped
from tests.helpers.graph_builder import GraphBuilder, convert, text
from tests.helpers.parity import (
    assert_equal_to_the_bit,
    assert_parity,
    assert_step,
    case,
    compiled,
    compiled_in_turn,
    make_case,
    simulate,
)
from tests.helpers.slow import slow

aten = torch.ops.aten
WORLD = 2


class Builder(GraphBuilder):
    """The backward of a row-parallel linear under sequence parallelism, in pieces."""

    def gather(self, x: Node, name: str) -> Node:
        return self.call(convert, x, "S(0)", "R", WORLD, name=name)

    def scatter(self, x: Node, name: str) -> Node:
        return self.call(convert, x, "P", "S(0)", WORLD, name=name)

    def mm(self, a: Node, b: Node, name: str) -> Node:
        return self.call(aten.mm.default, a, b, name=name)


OWN = {1}  # grad_w, of the two results below


def linear_backward(width: int = 60) -> Graph:
    """Gather the tangent; gradients of the weight and the input; scatter; go on.

    The first part takes ``width`` columns: the peak, if there are many.
    """
    b = Builder()
    x, w, p = b.input("x", 8, 4), b.input("w", 6, 4), b.input("p", width, 6)
    wide = b.call(aten.exp.default, b.input("z", 4, width), name="wide")
    full = b.gather(b.mm(wide, p, "g"), "full")
    turned = b.call(aten.t.default, full, name="turned")
    grad_w = b.mm(turned, x, "grad_w")
    grad_x = b.mm(full, w, "grad_x")
    part = b.scatter(grad_x, "part")
    last = b.call(aten.mul.Tensor, part, 2.0, name="last")
    return b.output(last, grad_w)


def test_a_chain_that_the_backend_fuses_stays_in_one_piece() -> None:
    """One operator hides beside the first gather; as three kernels the others follow later."""
    b = Builder()
    g, w, x = b.input("g", 2048, 2048), b.input("w", 2048, 2048), b.input("x", 8192, 2048)
    first = b.call(aten.exp.default, x, name="first")
    second = b.call(aten.neg.default, first, name="second")
    third = b.call(aten.sigmoid.default, second, name="third")
    near = b.gather(b.mm(g, w, "product"), "near")
    far = b.gather(b.mm(near, w, "other"), "far")
    graph = b.output(b.mm(far, w, "last"), third)
    apart, fused = (
        [line.split(" = ")[0] for line in text(overlapped(graph, (), None, 1 << 30, fused=fused))]
        for fused in (False, True)
    )
    start, end = ["product", "near"], ["far_arrived", "last"]
    beside_far = ["near_arrived", "other", "far", "second", "third"]
    assert apart == [*start, "first", *beside_far, *end]
    assert fused == [*start, "other", "far", "first", "second", "third", *end]


def test_the_gradient_of_a_weight_goes_behind_the_next_collective() -> None:
    before = linear_backward()
    as_it_was = str(before)
    assert text(overlapped(before, OWN)) == [
        "wide = exp(z)",
        "g = mm(wide, p)",
        "full = convert(g)",
        "grad_x = mm(full, w)",
        "part = convert(grad_x)",
        "turned = t(full)",
        "grad_w = mm(turned, x)",
        "part_arrived = wait(part)",
        "last = mul(part_arrived)",
    ]
    assert str(before) == as_it_was


def test_what_is_computed_again_runs_under_the_gather_before_it() -> None:
    b = Builder()
    x, w, g = b.input("x", 8, 6), b.input("w", 6, 6), b.input("g", 4, 6)
    full = b.gather(g, "full")
    again = b.call(aten.exp.default, x, name="again")
    grad = b.call(aten.mul.Tensor, full, again, name="grad")
    part = b.scatter(b.mm(grad, w, "grad_x"), "part")
    assert text(overlapped(b.output(part))) == [
        "full = convert(g)",
        "again = exp(x)",
        "full_arrived = wait(full)",
        "grad = mul(full_arrived, again)",
        "grad_x = mm(grad, w)",
        "part = convert(grad_x)",  # nothing is left to do meanwhile
    ]


def test_all_results_of_an_operator_stay_with_it() -> None:
    """One of a norm's three gradients leads to the next collective; the others follow it."""
    b = Builder()
    g, x, w = b.input("g", 4, 6), b.input("x", 4, 6), b.input("w", 6)
    mean, rstd = b.input("mean", 4, 1), b.input("rstd", 4, 1)
    backward = aten.native_layer_norm_backward.default
    args = (g, x, [6], mean, rstd, w, w, [True, True, True])
    norm = b.call(backward, *args, name="norm")
    grad_w = b.call(operator.getitem, norm, 1, name="grad_w")
    grad_x = b.call(operator.getitem, norm, 0, name="grad_x")
    scaled = b.call(aten.mul.Tensor, grad_w, 2.0, name="scaled")
    full = b.gather(grad_x, "full")
    last = b.call(aten.exp.default, full, name="last")
    assert [line.split(" = ")[0] for line in text(overlapped(b.output(last, scaled)))] == [
        "norm",
        "grad_w",
        "grad_x",
        "full",
        "scaled",
        "full_arrived",
        "last",
    ]


def unchanged() -> dict[str, Graph]:
    """Graphs in which nothing can run meanwhile."""
    found = {}
    b = Builder()
    x, w = b.input("x", 8, 4), b.input("w", 4, 4)
    found["no collective"] = b.output(b.mm(x, w, "a"), b.mm(x, w, "b"))
    b = Builder()
    x, w = b.input("x", 8, 4), b.input("w", 4, 4)
    part = b.scatter(b.mm(x, w, "a"), "part")
    found["used at once"] = b.output(b.call(aten.exp.default, part))
    b = Builder()
    x = b.input("x", 8, 4)
    part = b.scatter(b.call(aten.exp.default, x), "part")
    view = b.call(aten.view.default, part, [2, 2, 4])
    found["only a view between"] = b.output(b.call(aten.exp.default, view))
    b = Builder()
    x, w = b.input("x", 8, 4), b.input("w", 4, 4)
    first = b.mm(x, w, "first")
    second = b.mm(first, w, "second")
    found["all of it is sent"] = b.output(b.call(aten.exp.default, b.scatter(second, "part")))
    b = Builder()
    x = b.input("x", 8, 4)
    local = b.call(convert, x, "R", "S(0)", WORLD, name="mine")  # no communication
    found["nothing is sent"] = b.output(
        b.call(aten.exp.default, x), b.call(aten.exp.default, local)
    )
    return found


@pytest.mark.parametrize("name", unchanged())
def test_graphs_without_anything_to_do_meanwhile(name: str) -> None:
    graph = unchanged()[name]
    found = overlapped(graph)
    assert not any(is_wait(node) for node in found.nodes)
    assert sorted(text(found)) == sorted(text(graph))


def test_a_wait_is_typed_as_what_arrives_and_of_nothing_else() -> None:
    graph = overlapped(linear_backward(), OWN)
    (wait,) = [node for node in graph.nodes if is_wait(node)]
    assert derive(wait, [S(0)], WORLD) == [(S(0),)]
    assert derive(wait, [R], WORLD) == []
    wait.args = (next(node for node in graph.nodes if node.name == "grad_x"), WORLD)
    assert derive(wait, [S(0)], WORLD) == []


FULL, GRAD_X, PART, GRAD_W = 4 * 8 * 6, 4 * 8 * 4, 4 * 4 * 4, 4 * 6 * 4  # bytes


def test_what_is_sent_exists_until_it_has_arrived() -> None:
    """While grad_w is computed, grad_x is on its way."""
    graph = overlapped(linear_backward(), OWN)
    (wide, g, *rest) = [node for node in graph.nodes if node.op == "call_function"]
    g.replace_input_with(wide, graph.find_nodes(op="placeholder")[3])  # no longer the peak
    graph.erase_node(wide)
    assert backward_peak_bytes(graph, ()) == FULL + GRAD_X + PART + GRAD_W
    (wait,) = [node for node in rest if is_wait(node)]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    assert backward_peak_bytes(graph, ()) == FULL + PART + max(GRAD_X, GRAD_W)


def test_memory_comes_first() -> None:
    """The weight's gradient stays where it was if deferring it would raise the peak."""
    for width in range(1, 80):
        graph = linear_backward(width)
        found, before = overlapped(graph, OWN), backward_peak_bytes(graph, OWN)
        assert backward_peak_bytes(found, OWN) <= before
        pays = before >= FULL + GRAD_X + PART
        assert any(map(is_wait, found.nodes)) == pays, width


def test_room_beside_the_block_is_used_and_not_more() -> None:
    """With a byte less than it takes to send while the weight's gradient is computed, nothing."""
    graph, takes = linear_backward(width=1), FULL + GRAD_X + PART
    before = backward_peak_bytes(graph, OWN)
    assert before < takes
    for room, waits, peak in ((0, 0, before), (takes - 1, 0, before), (takes, 1, takes)):
        found = overlapped(graph, OWN, None, room)
        assert sum(map(is_wait, found.nodes)) == waits
        assert backward_peak_bytes(found, OWN) == peak


def test_a_copy_that_is_sent_does_not_raise_the_peak() -> None:
    """Columns are copied to be scattered; the copy is there while ``wide`` is computed."""
    for columns in range(1, 40):
        b = Builder()
        x, w = b.input("x", 8, columns), b.input("w", columns, 2)
        first = b.call(aten.exp.default, b.input("z", 8, 24))
        full = b.mm(first, b.input("p", 24, 4), "full")
        part = b.call(convert, full, "P", "S(1)", WORLD)
        again = b.mm(b.call(aten.exp.default, x, name="wide"), w, "again")
        graph = b.output(b.call(aten.mul.Tensor, part, again), b.call(aten.exp.default, full))
        found = overlapped(graph)
        assert backward_peak_bytes(found, ()) <= backward_peak_bytes(graph, ())
        assert columns > 8 or any(map(is_wait, found.nodes))  # few columns fit


@pytest.mark.parametrize("effect", ["draws", "writes"])
def test_effects_keep_their_order(effect: str) -> None:
    """Without one, ``second`` would run while the gather is on its way."""
    b = Builder()
    g, x = b.input("g", 4, 6), b.input("x", 8, 6)
    full = b.gather(g, "full")
    if effect == "draws":
        first = b.call(aten.rand_like.default, full, name="first")
        second = b.call(aten.rand_like.default, x, name="second")
    else:
        first = b.call(aten.mul_.Tensor, full, 2.0, name="first")
        second = b.call(aten.exp.default, x, name="second")
    graph = b.output(b.call(aten.mul.Tensor, first, second, name="last"))
    names = [line.split(" = ")[0] for line in text(overlapped(graph))]
    assert names == ["full", "first", "second", "last"]


@pytest.mark.parametrize("columns", [1, 40])
def test_what_is_sent_does_not_raise_the_peak(columns: int) -> None:
    """The gather has to arrive before ``again`` if that is the peak."""
    b = Builder()
    g, x, w = b.input("g", 4, 4), b.input("x", 8, columns), b.input("w", columns, 4)
    scaled = b.call(aten.mul.Tensor, g, 2.0, name="scaled")
    full = b.gather(scaled, "full")
    again = b.mm(b.call(aten.exp.default, x, name="wide"), w, "again")
    graph = b.output(b.call(aten.mul.Tensor, full, again, name="grad"))
    behind_wide = [line.split(" = ")[0] for line in text(overlapped(graph))][3:5]
    assert behind_wide == (["again", "full_arrived"] if columns == 1 else ["full_arrived", "again"])
    assert backward_peak_bytes(overlapped(graph), ()) == backward_peak_bytes(graph, ())


def test_time_under_a_collective_is_counted_once() -> None:
    graph = overlapped(linear_backward(), OWN)
    nodes = {node.name: node for node in graph.nodes}

    def link_us(name: str) -> float:
        (sent,) = node_collectives(nodes[name])
        return collective_us(sent.num_bytes, sent.kind, WORLD, H100)

    kernels = [compute_us(nodes[name], H100) for name in ("wide", "g", "grad_x", "last")]
    meanwhile = max(link_us("part"), compute_us(nodes["grad_w"], H100))
    expected = link_us("full") + sum(kernels) + meanwhile
    assert elapsed_us(graph, WORLD, H100) == pytest.approx(expected, rel=1e-12)
    assert elapsed_us(linear_backward(), WORLD, H100) > elapsed_us(graph, WORLD, H100)


def waits(program: CompiledProgram) -> int:
    """Of all backwards."""
    return sum(
        is_wait(node)
        for region in program.regions.values()
        for graph in [region.partitioned.step_backward]
        if graph is not None
        for node in graph.nodes
    )


def most_bytes(plain: CompiledProgram, more: int) -> int:
    """The peak of ``plain``, and what the backwards of so many more layers take."""
    memory, names = step_memory(plain), [call.region.name for call in plain.program.calls]
    layers = [
        moment.num_bytes - moment.around_bytes
        for moment in memory.timeline
        if moment.phase == "backward" and names.count(names[moment.call]) > 1
    ]
    return memory.peak_bytes + more * max(layers)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *itertools.product(["plain"], ["none", "selective", "full"]),
        *(slow("llama", each) for each in ("none", "selective", "full")),
        slow("t5", "selective"),
    ],
)
def test_gradients_are_those_without_overlap_to_the_last_bit(name: str, recompute: str) -> None:
    found = case(name, 2, 12)
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "recompute": recompute}
    program = compiled_in_turn(found, **options, overlap=True)
    plain = compiled_in_turn(found, **options, overlap=False)
    assert_step(found, program)
    assert waits(program) > 2
    assert waits(plain) == 0
    assert ".wait()" not in plain.code
    leaves = any(region.partitioned.split for region in program.regions.values())
    assert step_memory(program).peak_bytes <= most_bytes(plain, 2 if leaves else 1)
    assert_equal_to_the_bit(simulate(found, program).grads, simulate(found, plain).grads)


def test_nothing_waits_on_one_rank() -> None:
    assert waits(compiled(case("plain", 2, 12), tp=1, recompute="selective")) == 0


def test_the_last_region_is_not_fully_recomputed() -> None:
    """Its backward comes first: the head's product would be computed twice for nothing."""
    found = case("plain", 2, 12)
    full = compiled(found, tp=2, sequence_parallel=True, recompute="full")
    selective = compiled(found, tp=2, sequence_parallel=True, recompute="selective")
    head = full.program.calls[-1].region.name
    saved = {name: region.partitioned.saved for name, region in full.regions.items()}
    assert saved[head] == selective.regions[head].partitioned.saved
    assert len(saved["Block"]) < len(selective.regions["Block"].partitioned.saved)


class Heads(nn.Module):
    """Two equal layers, then heads for several vocabularies."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ParameterList(torch.randn(size, 8) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        losses = [F.linear(x, head).logsumexp(-1).sum() for head in self.heads]
        return torch.stack(losses).sum()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sizes", [(64,), (64, 60, 56, 52)])
def test_several_heads_are_recomputed_one_at_a_time(tp: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found = make_case(Heads(*sizes).double(), {"x": torch.randn(2, 8, 8, dtype=torch.float64)})
    full = assert_parity(found, tp=tp, recompute="full")
    selective = compiled(found, tp=tp, recompute="selective")
    last = full.program.calls[-1].region.name
    assert last not in {call.region.name for call in full.program.calls[:-1]}
    saved, kept = (p.regions[last].partitioned.saved for p in (full, selective))
    assert (saved == kept) == (len(sizes) == 1)
    one_bytes = 2 * 8 * 64 * 8 // tp
    peaks = [step_memory(program).peak_bytes for program in (full, selective)]
    if len(sizes) > 1:
        assert peaks[0] < peaks[1] - one_bytes


def test_sums_in_place_have_their_place() -> None:
    """Until a product is added to the others, its operands take memory."""
    b = Builder()
    x, y = b.input("x", 8, 4), b.input("y", 4, 6)
    full = b.gather(x, "full")
    total = b.call(aten.new_zeros.default, x, [8, 6], name="total")
    for index in range(6):
        left = b.call(aten.exp.default, x, name=f"left_{index}")
        total = b.call(ADD_PRODUCT.overload, total, left, y, WORLD, name=f"sum_{index}")
    graph = b.output(b.call(aten.exp.default, full, name="last"), total)
    ordered = overlapped(graph)
    assert any(map(is_wait, ordered.nodes))
    assert backward_peak_bytes(ordered, ()) <= backward_peak_bytes(graph, ())
