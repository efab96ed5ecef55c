"""Recomputation for the call before: cuts, numbers, memory, time, and when it is not done."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from benchmarks.memory_check import measure
from sp_compiler import compiler
from sp_compiler.base.errors import PlacementError
from sp_compiler.base.pass_report import Pass
from sp_compiler.check.partitioned import check_partitioned
from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.cost.step_memory import Room, step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import LookAhead, step_backwards
from sp_compiler.ir.op_traits import is_wait
from sp_compiler.passes.overlap.look_ahead import look_aheads
from sp_compiler.verification.verify import verify
from tests.helpers import parity
from tests.helpers.calls_in_a_row import INPUTS, SLOW, gpt, nodes_of
from tests.helpers.fake_group import fake_group
from tests.helpers.graph_builder import GraphBuilder, convert

aten = torch.ops.aten
_OPTIONS: dict[str, Any] = {"tp": 2, "recompute": "full", "hardware": SLOW}


def _backward() -> Graph:
    """Two recomputed products and their gathers; the gradients read both, and a view of one."""
    b = GraphBuilder()
    h, w, g = b.input("h", 4, 6), b.input("w", 6, 6), b.input("g", 8, 6)
    again = b.call(aten.mm.default, h, w, name="again")
    full = b.call(convert, again, "S(0)", "R", 2, name="full")
    turned = b.call(aten.t.default, full, name="turned")
    other = b.call(aten.exp.default, again, name="other")
    both = b.call(convert, other, "S(0)", "R", 2, name="both")
    late = b.call(aten.exp.default, both, name="late")
    for node in (again, full, turned, other, both, late):
        node.meta["recomputed"] = True
    grad_w = b.call(aten.mm.default, turned, g, name="grad_w")
    grad_h = b.call(aten.mul.Tensor, g, late, name="grad_h")
    return b.output(grad_h, grad_w)


def test_a_cut_hands_over_storages() -> None:
    """Not their views, which both sides make; nor what is made behind the last collective."""
    graph = _backward()
    last, first = look_aheads(graph, num_saved=2)
    assert nodes_of(last.recompute) == [
        *("h", "w", "again = h, w", "full = again", "other = again", "both = other"),
        "output = full, both",
    ]
    assert nodes_of(last.rest) == [
        *("h", "w", "full*", "both*", "g"),
        *("turned = full", "late = both", "grad_w = turned, g", "grad_h = g, late"),
        "output = grad_h, grad_w",
    ]
    assert nodes_of(last.both) == [
        *("h", "w", "full*", "both*", "h_before", "w_before", "g"),
        *("turned = full", "late = both", "grad_w = turned, g", "grad_h = g, late"),
        *("again_before = h_before, w_before", "full_before = again_before"),
        *("other_before = again_before", "both_before = other_before"),
        "output = grad_h, grad_w, full_before, both_before",
    ]
    # In front of the second gather, whose operand is made of what is handed over.
    assert nodes_of(first.recompute)[-1] == "output = again, full"
    assert nodes_of(first.rest)[:5] == ["h", "w", "again*", "full*", "g"]
    assert str(graph) == str(_backward())


def test_without_recomputed_collectives_there_is_no_cut() -> None:
    graph = _backward()
    for node in graph.nodes:
        if node.name in ("full", "both"):
            node.meta["recomputed"] = False
    assert list(look_aheads(graph, num_saved=2)) == []


@functools.cache
def _case() -> parity.Case:
    return parity.make_case(gpt(), INPUTS)


def _program(**options: Any) -> CompiledProgram:
    return parity.compiled_in_turn(_case(), **{**_OPTIONS, **options})


def _block(program: CompiledProgram) -> CompiledRegion:
    block = program.regions["Block"]
    assert isinstance(block, CompiledRegion)
    return block


def _ahead(program: CompiledProgram) -> LookAhead:
    ahead = _block(program).partitioned.ahead
    assert ahead is not None
    return ahead


def test_gradients_are_equal_to_the_bit() -> None:
    """Every layer but the first in the model recomputes for the one before it."""
    program = _program()
    parts = {name: region.partitioned for name, region in program.regions.items()}
    assert step_backwards(program.program, parts)[1:5] == [
        ("backward_ahead",) if index else ("backward_rest",) for index in range(3)
    ] + [("recompute", "backward_ahead")]
    expected = parity.simulate(_case(), _program(overlap=False)).grads
    actual = parity.simulate(_case(), program).grads
    parity.assert_equal_to_the_bit(actual, expected)
    # With the values of its own call instead of the call before.
    block = program.codes["Block"]
    both = block.backward_ahead  # type: ignore[attr-defined]

    def wrong(tp: Any, saved: Any, values: Any, before: Any, *tangents: Tensor) -> Any:
        return both(tp, saved, values, saved, *tangents)

    with mock.patch.object(block, "backward_ahead", staticmethod(wrong)):
        assert parity.gradient_error(parity.simulate(_case(), program).grads, expected) > 1e-3


@pytest.mark.slow
def test_verification_names_the_pass_of_a_wrong_function() -> None:
    """The block's own check sees it: in the model a step may run the other functions alone."""
    passes = compiler.overlap_collectives

    def wrong(*arguments: Any, **options: Any) -> Any:
        parts = passes(*arguments, **options)
        if parts.ahead is not None:
            graph = parts.ahead.rest
            node = next(each for each in graph.nodes if each.name.startswith("mm"))
            with graph.inserting_after(node):
                half = graph.call_function(aten.mul.Tensor, (node, 0.5))
            half.meta = dict(node.meta)
            node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
        return parts

    with mock.patch.object(compiler, "overlap_collectives", wrong):
        report = verify(gpt(num_layers=2), ((), INPUTS), **_OPTIONS)
    assert report.first_bad_pass == Pass.OVERLAP


def test_the_check_refuses_what_is_recomputed_under_another_placement() -> None:
    program = _program()
    block, ahead = _block(program), _ahead(program)
    graph = ahead.both
    output = graph.output_node()
    *others, gathered = output.args[0][: len(block.region.input_names) + 1]
    assert is_wait(gathered)
    output.args = ((*others, gathered.args[0].args[0], *output.args[0][len(others) + 1 :]),)
    with pytest.raises(PlacementError, match="recomputed ahead, must be R but is S"):
        check_partitioned(block.region, block.partitioned, block.joint.tangent_outputs, 2)


def test_a_step_holds_what_was_planned() -> None:
    """To the byte, with the peak where a backward looks ahead."""
    rooms = compiler.overlap_room

    def more(*arguments: Any) -> Any:
        found = rooms(*arguments)
        return {**found, "Block": Room(backward_bytes=1 << 40)}

    with mock.patch.object(compiler, "overlap_room", more):
        program = parity.compiled(_small(), **_OPTIONS)
    memory = step_memory(program)
    assert memory.peak_bytes == max(
        moment.num_bytes for moment in memory.timeline if moment.call in range(2, 5)
    )
    with fake_group(2):
        assert measure(_small(), program) == (memory.kept_bytes, memory.peak_bytes)


@functools.cache
def _small() -> parity.Case:
    """With so few words that the blocks are the peak of a step, and so wide that it is their MLP:
    where's number, of which attention makes a tensor, is not seen in backward."""
    model = gpt(vocab_size=96, hidden_size=64, dropout=0.0, attention_dropout=0.0)
    return parity.make_case(model, INPUTS)


def test_without_room_nothing_is_recomputed_ahead() -> None:
    """What is handed over would lie above the step's peak."""
    room = {"Block": Room()}
    with mock.patch.object(compiler, "overlap_room", return_value=room):
        program = parity.compiled(_small(), **_OPTIONS)
    assert _block(program).partitioned.ahead is None


def test_calls_that_do_not_follow_each_other_do_not_look_ahead() -> None:
    program = parity.compiled(parity.make_case(gpt(num_layers=1), INPUTS), **_OPTIONS)
    assert all(region.partitioned.ahead is None for region in program.regions.values())
