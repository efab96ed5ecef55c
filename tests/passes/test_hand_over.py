"""Gradients that the call before computes: what is handed over, numbers, memory, and when."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from benchmarks.memory_check import measure
from sp_compiler import compiler
from sp_compiler.base.errors import PlacementError
from sp_compiler.base.pass_report import Pass
from sp_compiler.check.partitioned import check_partitioned
from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.compiler import to_program
from sp_compiler.cost.hardware import Link
from sp_compiler.cost.memory import backward_peak_bytes
from sp_compiler.cost.node_cost import compute_us, elapsed_us
from sp_compiler.cost.step_memory import Room, step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned, SavedTensor, SplitBackward, step_backwards
from sp_compiler.ir.fx import calls
from sp_compiler.ir.op_traits import collective_of
from sp_compiler.ops.accumulate import ADD_PRODUCT
from sp_compiler.options import CompileOptions
from sp_compiler.passes import overlap
from sp_compiler.passes.overlap import hand_over_choice, overlap_collectives
from sp_compiler.passes.overlap.hand_over import HandOver, hand_over_of, movable_gradients
from sp_compiler.trace.export import capture
from sp_compiler.verification.verify import verify
from tests.helpers import parity
from tests.helpers.calls_in_a_row import INPUTS, LAYERS, SLOW, gpt, nodes_of
from tests.helpers.fake_group import fake_group
from tests.helpers.graph_builder import GraphBuilder, convert
from tests.helpers.open_sizes import assert_right, open_program, tokens

aten = torch.ops.aten
_OPTIONS: dict[str, Any] = {"tp": 2, "recompute": "selective", "hardware": SLOW}


def _parts() -> Partitioned:
    """A backward with two products of weights, of which one reads a gather that is its own."""
    b = GraphBuilder()
    w, x, h, g = b.input("w", 6, 6), b.input("x", 8, 6), b.input("h", 4, 6), b.input("g", 4, 6)
    full = b.call(convert, g, "S(0)", "R", 2, name="full")
    turned = b.call(aten.t.default, full, name="turned")
    grad_x = b.call(aten.mm.default, full, w, name="grad_x")
    grad_w = b.call(aten.mm.default, turned, x, name="grad_w")
    again = b.call(convert, h, "S(0)", "R", 2, name="again")
    grad_v = b.call(aten.mm.default, turned, again, name="grad_v")
    saved = tuple(
        SavedTensor(name, kind, (8, 6), torch.float32, 192, "", "", "", "")
        for name, kind in (("w", "param"), ("x", "activation"), ("h", "call"))
    )
    return Partitioned(Graph(), b.output(grad_x, grad_w, grad_v), saved, 0)


def _without(parts: Partitioned, late: list[int]) -> SplitBackward | None:
    moved = hand_over_of(parts, frozenset(late))
    return None if moved is None else moved.split()


def test_what_is_left_has_no_collectives() -> None:
    """And is handed over as storages, of which those of parameters and other calls stay theirs."""
    parts = _parts()
    assert movable_gradients(parts, [1, 2]) == [2, 1]
    last, first = _without(parts, [2]), _without(parts, [1])
    assert last is not None
    assert first is not None
    assert nodes_of(last.inputs) == [
        *("w", "x", "h", "g", "full = g", "turned = full", "grad_x = full, w"),
        *("grad_w = turned, x", "again = h", "output = grad_x, grad_w, full, again"),
    ]
    assert nodes_of(last.weights) == [
        *("full*", "again*", "turned = full", "grad_v = turned, again", "output = grad_v"),
    ]
    assert nodes_of(first.weights)[:2] == ["x*", "full*"]
    assert first.both is not None
    assert nodes_of(first.both) == [
        *("w", "x", "h", "x_behind*", "full_behind*", "g"),
        *("turned_behind = full_behind", "grad_w_behind = turned_behind, x_behind"),
        *("full = g", "turned = full", "grad_x = full, w", "again = h"),
        *("grad_v = turned, again", "output = grad_x, grad_w_behind, grad_v, x, full"),
    ]
    assert (last.late, first.late) == ((2,), (1,))
    assert str(parts.backward) == str(_parts().backward)


def test_gradients_that_are_added_to_others_are_not_left() -> None:
    assert movable_gradients(_parts(), []) == []


def test_several_are_left_with_their_common_operand_once() -> None:
    both = _without(_parts(), [1, 2])
    assert both is not None
    assert nodes_of(both.inputs) == [
        *("w", "x", "h", "g", "full = g", "grad_x = full, w", "again = h"),
        "output = grad_x, x, full, again",
    ]
    assert nodes_of(both.weights) == [
        *("x*", "full*", "again*", "turned = full", "grad_w = turned, x"),
        *("grad_v = turned, again", "output = grad_w, grad_v"),
    ]
    assert both.both is not None
    assert (
        nodes_of(both.both)[-1] == "output = grad_x, grad_w_behind, grad_v_behind, x, full, again"
    )
    assert both.late == (1, 2)


def test_what_reads_parameters_is_not_left() -> None:
    """A hook may update them before: the optimizer in backward."""
    b = GraphBuilder()
    w, a, x = b.input("w", 6, 6), b.input("a", 6, 6), b.input("x", 8, 6)
    g = b.input("g", 4, 6)
    full = b.call(convert, g, "S(0)", "R", 2, name="full")
    grad_x = b.call(aten.mm.default, full, w, name="grad_x")
    again = b.call(aten.mm.default, x, b.call(aten.t.default, a, name="turned_a"), name="again")
    turned = b.call(aten.t.default, full, name="turned")
    grad_v = b.call(aten.mm.default, turned, again, name="grad_v")
    saved = tuple(
        SavedTensor(name, kind, (8, 6), torch.float32, 192, "", "", "", "")
        for name, kind in (("w", "param"), ("a", "param"), ("x", "activation"))
    )
    parts = Partitioned(Graph(), b.output(grad_x, None, grad_v), saved, 0)
    way = _without(parts, [2])
    assert way is not None
    assert nodes_of(way.weights) == [
        *("full*", "again*", "turned = full", "grad_v = turned, again", "output = grad_v"),
    ]


@pytest.mark.parametrize("late", ["of the sum", "scaled"])
def test_what_the_caller_keeps_is_not_left(late: str) -> None:
    """Of two weights that are added, one gradient may be the other, or read it: what is in ``grad``
    is changed in place."""
    b = GraphBuilder()
    x, g = b.input("x", 8, 6), b.input("g", 4, 6)
    full = b.call(convert, g, "S(0)", "R", 2, name="full")
    grad = b.call(aten.mm.default, b.call(aten.t.default, full, name="turned"), x, name="grad")
    scaled = b.call(aten.mul.Tensor, grad, 2.0, name="scaled")
    other = b.call(aten.t.default, grad, name="other") if late == "of the sum" else scaled
    saved = (SavedTensor("x", "activation", (8, 6), torch.float32, 192, "", "", "", ""),)
    parts = Partitioned(Graph(), b.output(None, grad, other), saved, 0)
    assert _without(parts, [1]) is None
    assert _without(parts, [2]) is None


def _three_products() -> Partitioned:
    """A gather beside which nothing can run but gradients of weights of the call behind."""
    b = GraphBuilder()
    w, x, g = b.input("w", 6, 6), b.input("x", 8, 6), b.input("g", 4, 6)
    full = b.call(convert, g, "S(0)", "R", 2, name="full")
    turned = b.call(aten.t.default, full, name="turned")
    grad_x = b.call(aten.mm.default, full, w, name="grad_x")
    grads = [b.call(aten.mm.default, turned, x, name=f"grad_{name}") for name in "abc"]
    saved = tuple(
        SavedTensor(name, kind, (8, 6), torch.float32, 192, "", "", "", "")
        for name, kind in (("w", "param"), ("x", "activation"))
    )
    graph = b.output(grad_x, *grads)
    return Partitioned(graph, graph, saved, 0)


@pytest.mark.parametrize(("more_bytes", "count"), [(1 << 20, 2), (-1, 0)])
def test_as_many_are_left_as_hide_more(more_bytes: int, count: int) -> None:
    parts, own = _three_products(), [1, 2, 3]
    assert parts.backward is not None
    (product, *_) = parts.backward.find_nodes(op="call_function", target=aten.mm.default)
    # One takes two thirds of the time of the gather of 96 bytes.
    link = Link(0.0, 0.096 / (1.5 * compute_us(product, SLOW)))
    hardware = replace(SLOW, interconnect=dict.fromkeys(SLOW.interconnect, link))
    both = _without(parts, [1])
    assert both is not None
    assert both.both is not None
    room = Room(backward_bytes=backward_peak_bytes(both.both, own) + more_bytes)
    split = overlap_collectives(parts, own, None, room, hardware, in_a_row=True).split
    assert (0 if split is None else len(split.late)) == count
    if split is not None:
        assert split.both is not None
        kernels_us = sum(compute_us(node, hardware) for node in split.both.nodes)
        assert elapsed_us(split.both, 2, hardware) == pytest.approx(kernels_us, rel=1e-9)


def test_both_functions_of_a_call_run_collectives_in_the_same_order() -> None:
    """Which of them runs depends on when a hook lets the call before run."""
    split = _split(_program())
    names = [
        [node.name for node in graph.nodes if collective_of(node) is not None]
        for graph in (split.inputs, split.both)
        if graph is not None
    ]
    assert names[0] == names[1]
    assert len(names[0]) > 2


@functools.cache
def _case() -> parity.Case:
    return parity.make_case(gpt(), INPUTS)


@functools.cache
def _small() -> parity.Case:
    """With so few words that the blocks are the peak of a step."""
    return parity.make_case(gpt(vocab_size=96, dropout=0.0, attention_dropout=0.0), INPUTS)


def _program(**options: Any) -> CompiledProgram:
    return parity.compiled_in_turn(_case(), **{**_OPTIONS, **options})


def _block(program: CompiledProgram) -> CompiledRegion:
    block = program.regions["Block"]
    assert isinstance(block, CompiledRegion)
    return block


def _split(program: CompiledProgram) -> SplitBackward:
    split = _block(program).partitioned.split
    assert split is not None
    return split


def test_gradients_are_equal_to_the_bit() -> None:
    """Every layer but the first in the model leaves a gradient to the layer before it."""
    program = _program()
    parts = {name: region.partitioned for name, region in program.regions.items()}
    assert step_backwards(program.program, parts)[1 : LAYERS + 1] == [
        ("backward_behind", "backward_weights"),
        *[("backward_behind",)] * (LAYERS - 2),
        ("backward_inputs",),
    ]
    expected = parity.simulate(_case(), _program(overlap=False)).grads
    actual = parity.simulate(_case(), program).grads
    parity.assert_equal_to_the_bit(actual, expected)
    # With twice what the layer behind has left.
    block = program.codes["Block"]
    both = block.backward_behind  # type: ignore[attr-defined]

    def wrong(tp: Any, saved: Any, rest: Any, *tangents: Tensor) -> Any:
        return both(tp, saved, [2 * value for value in rest], *tangents)

    with mock.patch.object(block, "backward_behind", staticmethod(wrong)):
        assert parity.gradient_error(parity.simulate(_case(), program).grads, expected) > 1e-3


class _Mlp(nn.Module):
    """With a view that is made again from an operand of the gradient that is left."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.slow
def test_open_sizes_are_handed_over() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Mlp() for _ in range(3)]).double()
    program = open_program(model, {"input": tokens(2, 12)}, **_OPTIONS)
    assert any(each.partitioned.split for each in program.regions.values())
    for shape in ((2, 12), (3, 17), (5, 7)):
        assert_right(program, model, {"input": tokens(*shape)})


@pytest.mark.slow
@pytest.mark.parametrize("function", ["inputs", "weights", "both"])
def test_verification_names_the_pass_of_a_wrong_function(function: str) -> None:
    """The block's own check sees it: in the model a step may run the other functions alone."""
    passes = compiler.overlap_collectives
    products = (aten.mm.default, aten.sum.dim_IntList)

    def wrong(*arguments: Any, **options: Any) -> Any:
        parts = passes(*arguments, **options)
        if parts.split is not None:
            graph = getattr(parts.split, function)
            node = next(node for node in graph.nodes if node.target in products)
            with graph.inserting_after(node):
                half = graph.call_function(aten.mul.Tensor, (node, 0.5))
            half.meta = dict(node.meta)
            node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
        return parts

    with mock.patch.object(compiler, "overlap_collectives", wrong):
        report = verify(gpt(num_layers=2), ((), INPUTS), **_OPTIONS)
    assert report.first_bad_pass == Pass.OVERLAP


def test_the_check_refuses_what_is_left_under_another_placement() -> None:
    program = _program()
    block, split = _block(program), _split(program)
    assert split.both is not None
    output, tangent = split.both.output_node(), split.both.find_nodes(op="placeholder")[-1]
    num_inputs = len(block.region.input_names)
    results, left = output.args[0][:num_inputs], output.args[0][num_inputs:]
    output.args = ((*results, *[tangent] * len(left)),)
    with pytest.raises(PlacementError, match=r"left to the call before, must be .* but is S\(0\)"):
        check_partitioned(block.region, block.partitioned, block.joint.tangent_outputs, 2)


def _leaving(number: slice, recompute: str) -> CompiledProgram:
    """Of those that may be left, in whatever memory."""
    rooms = compiler.overlap_room
    wanted: list[int] = []

    def more(*arguments: Any) -> Any:
        return {**rooms(*arguments), "Block": Room(backward_bytes=1 << 40)}

    def one(parts: Partitioned, own: Any) -> list[int]:
        alone = [index for index in movable_gradients(parts, own) if _without(parts, [index])]
        wanted[:] = alone[number]
        return wanted[:1]

    def hand_over_wanted(parts: Partitioned, _: Any) -> HandOver | None:
        return hand_over_of(parts, frozenset(wanted))

    with (
        mock.patch.object(compiler, "overlap_room", more),
        mock.patch.object(overlap, "look_aheads", return_value=()),
        mock.patch.object(hand_over_choice, "movable_gradients", one),
        mock.patch.object(hand_over_choice, "hand_over_of", hand_over_wanted),
        mock.patch.object(hand_over_choice, "WORTH_MORE_FUNCTIONS", -1.0),
    ):
        return parity.compiled(_small(), **{**_OPTIONS, "recompute": recompute})


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_step_holds_what_was_planned(recompute: str) -> None:
    """To the byte, with the peak in a layer's backward, whatever gradients are handed over."""
    late = []
    for number in (slice(1), slice(2, 3), slice(3)):
        program = _leaving(number, recompute)
        late.append(_split(program).late)
        memory = step_memory(program)
        assert memory.peak_bytes == max(
            moment.num_bytes for moment in memory.timeline if moment.call in range(1, LAYERS + 1)
        )
        with fake_group(2):
            assert measure(_small(), program) == (memory.kept_bytes, memory.peak_bytes)
    assert late[0] != late[1]
    assert [len(each) for each in late] == [1, 1, 3]


@pytest.mark.slow
def test_several_gradients_are_equal_to_the_bit() -> None:
    program = _leaving(slice(None), "selective")
    assert len(_split(program).late) > 5
    expected = parity.simulate(_small(), parity.compiled(_small(), **_OPTIONS, overlap=False)).grads
    actual = parity.simulate(_small(), program).grads
    parity.assert_equal_to_the_bit(actual, expected)


@pytest.mark.slow
def test_sums_of_half_batches_are_left() -> None:
    """Accumulated in the function of the call before, to the bit as in one's own."""
    links = dict.fromkeys(SLOW.interconnect, Link(0.0, 100.0))
    wishes: dict[str, Any] = {
        "tp": 2,
        "recompute": "none",
        "hardware": replace(SLOW, interconnect=links),
    }
    captured = capture(gpt(), (), INPUTS, lift_casts=True)
    outlined = to_program(captured, CompileOptions(**wishes, half_batches=True))
    halves = replace(_case(), program=outlined, latest=[])
    program = parity.compiled_in_turn(halves, **wishes)
    split = _split(program)
    assert split.both is not None
    for graph in (split.weights, split.both):
        assert [*calls(graph, ADD_PRODUCT.overload)]
    expected = parity.simulate(halves, parity.compiled_in_turn(halves, **wishes, overlap=False))
    actual = parity.simulate(halves, program)
    parity.assert_equal_to_the_bit(actual.grads, expected.grads)
    memory = step_memory(program)
    with fake_group(2):
        assert measure(halves, program) == (memory.kept_bytes, memory.peak_bytes)


def test_without_room_nothing_is_left() -> None:
    """What is handed over would lie above the step's peak."""
    with mock.patch.object(compiler, "overlap_room", return_value={"Block": Room()}):
        program = parity.compiled(_small(), **_OPTIONS)
    assert _block(program).partitioned.split is None
