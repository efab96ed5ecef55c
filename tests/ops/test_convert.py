"""Conversions: the numbers of each, those of its gradient, and what the table says of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from sp_compiler.base.placement import I, P, Placement, R, S, T
from sp_compiler.check.derive import declared_strategies
from sp_compiler.ir.op_traits import base, collective_of
from sp_compiler.ops.communicator import Communicator, running_on
from sp_compiler.ops.convert import (
    CONVERSIONS,
    CONVERT,
    CONVERT_IN_PLACE,
    LINK_CROSSINGS,
    WAIT,
    conversion_between,
)
from sp_compiler.rules.strategies import Strategy
from sp_compiler.verification.simulate import gather_check, scatter, simulated_ranks
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of

aten = torch.ops.aten
_X = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_SHARDS = [S(0), S(0, (4, 4)), S(1), S(1, (8, 4)), S(1, (4, 4, 4))]
_PAIRS = [
    (source, target)
    for kinds in CONVERSIONS
    for source, target in itertools.product(
        *[_SHARDS if kind == "S" else [Placement(kind)] for kind in kinds]
    )
]
_PADDED = [(S(0, (7,)), R), (R, S(0, (7,))), (P, S(1, (11,))), (S(1, (11,)), I)]


def _case(source: Placement, target: Placement, world_size: int) -> Case:
    sizes = [*(p.segments[0] for p in (source, target) if len(p.segments) == 1), 12]
    dim = next((p.dim for p in (source, target) if len(p.segments) == 1), 1)
    x = _X.narrow(dim, 0, sizes[0])
    rest = (str(source), str(target), world_size)
    return Case(CONVERT, lambda x: x * 1, [x], rest, (source,), (target,))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("source", "target"), [p for p in _PAIRS if p != (R, I)], ids=str)
def test_converted_value_and_gradient(
    source: Placement, target: Placement, world_size: int
) -> None:
    assert_right(_case(source, target, world_size), world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("source", "target"), _PADDED, ids=str)
def test_padded_shards(source: Placement, target: Placement, world_size: int) -> None:
    assert_right(_case(source, target, world_size), world_size)


def test_a_conversion_that_changes_nothing_leaves_strides_as_they_are() -> None:
    """Or a graph would view what has to be copied, and the plan would miss the copy."""
    b = GraphBuilder()
    turned = b.call(aten.t.default, b.input("x", 8, 12))
    for source, target, strides in (("I", "R", (1, 12)), ("P", "I", (8, 1))):
        value = b.call(CONVERT.overload, turned, source, target, 2).meta["val"]
        assert value.stride() == strides


def test_a_gradient_that_nothing_typed_is_not_made_up() -> None:
    """R -> I is for values without gradient: its own would be I -> P, which there is not."""
    assert conversion_between(I, P) is None
    with simulated_ranks(2) as tp, running_on(tp):
        x = scatter(_X, R, 2).requires_grad_()
        y = CONVERT.overload(x, "R", "I", 2)
        assert torch.equal(gather_check(y, I), _X)
        with pytest.raises(AssertionError, match="no conversion I -> P"):
            y.sum().backward()


@pytest.mark.parametrize("kinds", CONVERSIONS)
def test_table(kinds: tuple[str, str]) -> None:
    """Every row is a method of the communicator; what sharding may choose has a gradient."""
    row = CONVERSIONS[kinds]
    source, target = (Placement(kind) for kind in kinds)
    assert not row.method or callable(getattr(Communicator, row.method))
    assert row.link_crossings == LINK_CROSSINGS.get(row.method, 0)
    assert row.text
    if row.offered:
        assert conversion_between(target.dual, source.dual) is not None


def test_rows_of_tokens_are_shards() -> None:
    assert conversion_between(T(2), R) is CONVERSIONS["S", "R"]
    assert conversion_between(P, T(2)) is CONVERSIONS["P", "S"]
    assert conversion_between(S(0), S(1)) is None


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_reduction_in_place(world_size: int) -> None:
    """Generated code finds the sum in what it gave; a graph that is interpreted gets another."""
    with simulated_ranks(world_size) as tp:
        x, y, z = (scatter(_X, P, world_size) for _ in range(3))
        assert torch.equal(gather_check(tp.all_reduce_(x, "P", "I"), I), _X)
        assert torch.equal(gather_check(x, I), _X)
        pending = tp.start_all_reduce_(y, "P", "I")
        assert torch.equal(gather_check(pending.wait(), I), _X)
        assert torch.equal(gather_check(y, I), _X)
        with running_on(tp):
            result = CONVERT_IN_PLACE.overload(z, "P", "I", world_size)
        assert torch.equal(gather_check(result, I), _X)
    node = node_of(CONVERT_IN_PLACE, [_X], ("P", "I", world_size))
    assert base(node) is node.args[0]
    assert collective_of(node) == "all_reduce"


def test_the_checks_are_told_of_no_conversion_that_there_is_not() -> None:
    node = node_of(CONVERT, [_X], ("R", "P", 2))
    assert declared_strategies(node, 2) == []
    assert declared_strategies(node_of(CONVERT, [_X], ("S(0)", "R", 3)), 2) == []


def test_registered() -> None:
    assert_registered(CONVERT, _X.clone().requires_grad_(), "I", "R", 1)
    assert_registered(CONVERT, _X.clone().requires_grad_(), "S(1|8,4)", "R", 1)
    assert_registered(CONVERT_IN_PLACE, _X, "P", "I", 1)
    assert_registered(WAIT, _X, 1)


def test_wait_is_what_was_sent_for() -> None:
    builder = GraphBuilder()
    x = builder.input("x", 4, 6)
    sent = builder.call(CONVERT.overload, x, "S(0)", "I", 2)
    waited = builder.call(WAIT.overload, sent, 2)
    assert declared_strategies(waited, 2) == [Strategy((I,), (I,))]
    assert waited.meta["val"].shape == (8, 6)
    assert declared_strategies(builder.call(WAIT.overload, x, 2), 2) == []
    with running_on(Communicator(None, 0, 1)):
        arrived = WAIT.overload(_X, 1)
    assert torch.equal(arrived, _X)
