"""The check of final graphs: every backward that runs, every wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.placement import P, S
from sp_compiler.check import check_partitioned, partitioned
from sp_compiler.codegen.module_text import CompiledRegion, printed_regions
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import calls
from sp_compiler.ir.op_traits import is_wait
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ops.convert import CONVERT_IN_PLACE
from tests.helpers import parity
from tests.helpers.compiled_region import compile_region
from tests.helpers.sharded_regions import (
    WORLD,
    conversions,
    copied_graphs,
    drop,
    is_identity,
    sharded,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def regions() -> dict[str, CompiledRegion]:
    """Backwards of a compiled model, overlapped with collectives; the last one has the loss."""
    return printed_regions(parity.compiled(parity.case("gpt2", 2, 12), tp=WORLD))


def _check(compiled: CompiledRegion, parts: Partitioned) -> object:
    return check_partitioned(compiled.region, parts, compiled.joint.tangent_outputs, WORLD)


def test_refuses_a_broken_backward_of_the_loss(regions: dict[str, CompiledRegion]) -> None:
    """It runs in every ordinary step, in place of the backward of all outputs."""
    epilogue = regions["Epilogue"]
    loss = epilogue.partitioned.loss
    assert loss is not None
    tried = 0
    for index, original in enumerate(conversions(loss.backward)):
        if is_identity(original):
            continue
        graph = copy_graph(loss.backward)
        drop(conversions(graph)[index])
        broken = replace(epilogue.partitioned, loss=replace(loss, backward=graph))
        with pytest.raises(PlacementError):
            _check(epilogue, broken)
        tried += 1
    assert tried
    _check(epilogue, epilogue.partitioned)


def test_refuses_the_tangent_of_another_output(regions: dict[str, CompiledRegion]) -> None:
    epilogue = regions["Epilogue"]
    loss = epilogue.partitioned.loss
    assert loss is not None
    sharded = [i for i, p in enumerate(epilogue.region.output_placements) if p.is_sharded]
    assert sharded
    broken = replace(epilogue.partitioned, loss=replace(loss, output=sharded[0]))
    with pytest.raises(PlacementError):
        _check(epilogue, broken)


@pytest.mark.parametrize("early", ["reader", "second wait", "no wait"])
def test_refuses_what_reads_a_collective_before_it_has_arrived(
    regions: dict[str, CompiledRegion], early: str
) -> None:
    block = regions["GPT2Block"]
    parts = copied_graphs(block.partitioned)
    assert parts.backward is not None
    wait = next(node for node in parts.backward.nodes if is_wait(node))
    reader = next(iter(wait.users))
    if early == "reader":
        reader.replace_input_with(wait, wait.args[0])
    elif early == "second wait":
        with parts.backward.inserting_before(reader):
            again = parts.backward.node_copy(wait)
        reader.replace_input_with(wait, again)
    else:
        wait.replace_input_with(wait.args[0], wait.args[0].args[0])
    with pytest.raises(PlacementError):
        _check(block, parts)


def test_refuses_a_placement_that_a_value_does_not_have(
    regions: dict[str, CompiledRegion],
) -> None:
    """Declarations are printed in comments; sizes of memory and of messages follow them."""
    block = regions["GPT2Block"]
    parts = copied_graphs(block.partitioned)
    for node in parts.forward.nodes:
        if node.op == "call_function" and node.meta.get("placement") == S(0):
            node.meta["placement"] = P
            with pytest.raises(PlacementError, match=f"{node.name} is declared P but is"):
                _check(block, parts)
            return
    pytest.fail("no sharded value in the forward")


@pytest.fixture(scope="module")
def block() -> CompiledRegion:
    """With all-reduces in place."""
    found = parity.case("gpt2", 2, 12)
    return printed_regions(parity.compiled(found, tp=WORLD, sequence_parallel=False))["GPT2Block"]


def _with_reduction(block: CompiledRegion) -> tuple[Partitioned, Node]:
    forward = copy_graph(block.partitioned.forward)
    reduction = next(calls(forward, CONVERT_IN_PLACE.overload))
    return replace(block.partitioned, forward=forward), reduction


def test_refuses_what_reads_memory_that_was_written(block: CompiledRegion) -> None:
    """Even where the placement would do."""
    parts, reduction = _with_reduction(block)
    sent = reduction.args[0]
    later = next(node for node in reduction.users if node.op == "call_function")
    with parts.forward.inserting_before(later):
        again = parts.forward.create_node("call_function", torch.ops.aten.neg.default, (sent,))
    again.meta = dict(sent.meta)
    with pytest.raises(PlacementError, match=f"{again.name} reads .*{reduction.name} has written"):
        _check(block, parts)


def test_refuses_a_write_into_an_argument(block: CompiledRegion) -> None:
    parts, reduction = _with_reduction(block)
    *_, hidden = parts.forward.find_nodes(op="placeholder")
    reduction.args = (hidden, *reduction.args[1:])
    with pytest.raises(PlacementError, match=f"{reduction.name} writes into an argument"):
        _check(block, parts)


def test_a_value_read_twice_has_one_placement() -> None:
    """Ones are a shard as well as replicated, but not both in one product with themselves."""

    def product(x: Tensor) -> Tensor:
        ones = torch.ones(4, 4, dtype=x.dtype)
        return x + torch.matmul(ones, ones)

    right = sharded(product, {"x": ((4, 4), "R")}, "R", "Product")
    compiled = compile_region(right, recompute="none")
    parts, tangents = compiled.partitioned, compiled.joint.tangent_outputs
    check_partitioned(right, parts, tangents, WORLD)
    # As if ones of (8, 4), sharded by rows, had been multiplied by ones of (4, 4).
    wrong = replace(right, input_placements=(S(0),), output_placements=(S(0),))
    with pytest.raises(PlacementError):
        check_partitioned(wrong, parts, tangents, WORLD)


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_what_is_joined_is_read_alike(join: Callable[..., Tensor]) -> None:
    """Each of the zeros has four readings, so together they would have hundreds."""

    def joined(x: Tensor) -> Tensor:
        zeros = [torch.zeros(4, 4, dtype=x.dtype) for _ in range(4)]
        empty = [torch.zeros(0, dtype=x.dtype)] if join is torch.cat else []
        return join([*empty, *zeros, x * 2])

    right = sharded(joined, {"x": ((4, 4), "R")}, "R", "Joined")
    compiled = compile_region(right, recompute="none")
    parts, tangents = compiled.partitioned, compiled.joint.tangent_outputs
    with mock.patch.object(partitioned, "derive", wraps=partitioned.derive) as derive:
        check_partitioned(right, parts, tangents, WORLD)
    assert derive.call_count < 20
    # Rows of x that are one rank's, beside zeros that are all there: rows would be missing.
    wrong = replace(right, input_placements=(S(0),))
    with pytest.raises(PlacementError):
        check_partitioned(wrong, parts, tangents, WORLD)
