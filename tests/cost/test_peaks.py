"""Peaks of a function around its collectives, against bytes counted by hand.

Tensors of 8 x 6 floats have 192 bytes; a half has 96.
"""

from __future__ import annotations

import pytest
import torch

from sp_compiler.cost.memory import backward_peak_bytes, function_peak_bytes
from tests.helpers.graph_builder import GraphBuilder, convert

aten = torch.ops.aten
wait = torch.ops.sp_compiler.wait.default
FULL, HALF = 8 * 6 * 4, 8 * 6 * 2


@pytest.mark.parametrize(
    ("source", "target", "shape", "copied"),
    [
        ("P", "S(0)", (8, 6), 0),
        # The parts of each rank are brought together in front, which copies what is sent.
        ("P", "S(1)", (8, 6), FULL),
        ("P", "S(0|4,4)", (8, 6), FULL),
        ("P", "S(1|2,4)", (8, 6), 2 * FULL - HALF),
    ],
)
def test_a_reduction_copies_what_it_scatters(
    source: str, target: str, shape: tuple[int, ...], copied: int
) -> None:
    b = GraphBuilder()
    made = b.call(aten.exp.default, b.input("x", *shape))
    part = b.call(convert, made, source, target, 2)
    assert backward_peak_bytes(b.output(part), set()) == FULL + HALF + copied


@pytest.mark.parametrize(
    ("source", "copied"), [("S(0)", 0), ("S(1)", FULL), ("S(0|4,4)", FULL), ("S(1|2,4)", FULL)]
)
def test_a_gather_copies_what_has_arrived(source: str, copied: int) -> None:
    b = GraphBuilder()
    shape = (4, 6) if source.startswith("S(0") else (8, 3)
    made = b.call(aten.exp.default, b.input("x", *shape))
    full = b.call(convert, made, source, "R", 2)
    assert backward_peak_bytes(b.output(full), set()) == HALF + FULL + copied


@pytest.mark.parametrize(("twice", "copies"), [(False, 1), (True, 2)])
def test_pointwise_operators_copy_lazy_conjugates(twice: bool, copies: int) -> None:
    b = GraphBuilder()
    x, y = (b.input(name, 8, 8, dtype=torch.complex64) for name in "xy")
    conjugate = b.call(aten._conj.default, x)
    product = b.call(aten.mul.Tensor, conjugate, conjugate if twice else y)
    assert function_peak_bytes(b.output(product)) == (1 + copies) * 8 * 8 * 8


def test_what_makes_the_conjugate_copies_nothing_else() -> None:
    b = GraphBuilder()
    conjugate = b.call(aten._conj.default, b.input("x", 8, 8, dtype=torch.complex64))
    made = b.call(aten.conj_physical.default, conjugate)
    assert function_peak_bytes(b.output(made)) == 8 * 8 * 8


def test_a_reduction_of_all_copies_nothing() -> None:
    b = GraphBuilder()
    made = b.call(aten.exp.default, b.input("x", 8, 6))
    total = b.call(convert, made, "P", "I", 2)
    assert backward_peak_bytes(b.output(total), set()) == 2 * FULL


@pytest.mark.parametrize(("starts", "held"), [(True, HALF), (False, 0)])
def test_a_started_collective_holds_what_it_sends_until_it_has_arrived(
    starts: bool, held: int
) -> None:
    b = GraphBuilder()
    x, other, w = b.input("x", 4, 6), b.input("other", 100, 6), b.input("w", 6, 1)
    sent = b.call(aten.exp.default, x)
    full = b.call(convert, sent, "S(0)", "R", 2)
    meanwhile = b.call(aten.exp.default, other)
    arrived = b.call(wait, full, 2) if starts else full
    graph = b.output(b.call(aten.mm.default, arrived, w), meanwhile)
    large, result = 100 * 6 * 4, 8 * 4
    assert backward_peak_bytes(graph, set()) == FULL + large + (held or result)


def test_a_started_gather_copies_when_it_has_arrived() -> None:
    """Beside what was made meanwhile: at the start, that was not there yet."""
    b = GraphBuilder()
    x, other = b.input("x", 8, 3), b.input("other", 100, 6)
    full = b.call(convert, b.call(aten.exp.default, x), "S(1)", "R", 2)
    meanwhile = b.call(aten.exp.default, other)
    graph = b.output(b.call(wait, full, 2), meanwhile)
    assert backward_peak_bytes(graph, set()) == HALF + FULL + 100 * 6 * 4 + FULL


@pytest.mark.parametrize(
    ("source", "target", "shape", "sent", "result"),
    [
        ("P", "S(1)", (6, 8), FULL, HALF),
        ("P", "S(1|4,4)", (6, 8), FULL, HALF),
        ("P", "S(0)", (8, 6), FULL, HALF),  # a transposed one
        ("S(0)", "R", (8, 6), FULL, 2 * FULL),
    ],
)
def test_a_started_collective_holds_the_copy_that_it_sends(
    source: str, target: str, shape: tuple[int, ...], sent: int, result: int
) -> None:
    """Until it has arrived, beside its operand if that is read later."""
    b = GraphBuilder()
    other = b.input("other", 100, 6)
    made = b.call(aten.exp.default, b.input("x", *reversed(shape)))
    part = b.call(convert, b.call(aten.t.default, made), source, target, 2)
    meanwhile = b.call(aten.exp.default, other)
    arrived = b.call(wait, part, 2)
    graph = b.output(arrived, meanwhile, b.call(aten.exp.default, made))
    assert backward_peak_bytes(graph, set()) == FULL + sent + result + 100 * 6 * 4


def test_a_started_collective_does_not_hold_what_it_has_copied() -> None:
    b = GraphBuilder()
    made = b.call(aten.exp.default, b.input("x", 8, 6))
    part = b.call(convert, made, "P", "S(1)", 2)
    meanwhile = b.call(aten.exp.default, b.input("other", 100, 6))
    graph = b.output(b.call(wait, part, 2), meanwhile)
    assert backward_peak_bytes(graph, set()) == FULL + HALF + 100 * 6 * 4
