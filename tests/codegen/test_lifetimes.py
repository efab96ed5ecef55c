"""Names are bound anew where their value is read no more, and deleted where its storage dies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.codegen.lifetimes import Lifetimes
from tests.codegen.test_nesting import body_of
from tests.helpers.compiled_region import compile_region
from tests.helpers.regions import TP1, random_inputs, reference, region_of

X = torch.randn(4, 6)


class Again(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.cumsum(0)
        y = y.cumsum(1)
        return y.cumsum(0)


def test_a_value_read_for_the_last_time_gives_its_name_away() -> None:
    assert body_of(Again()) == [
        "y = aten_cumsum(x, 0)",
        "y = aten_cumsum(y, 1)",
        "cumsum = aten_cumsum(y, 0)",
    ]


class StillRead(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        old = y = x.cumsum(0)
        y = y.cumsum(1)
        return y.cumsum(0) @ old.t()


def test_a_value_that_is_read_later_keeps_its_name() -> None:
    lines = body_of(StillRead())
    assert lines[1].startswith("y = aten_cumsum(")
    assert not lines[0].startswith("y = ")


class BoundAgain(nn.Module):
    """``y`` dies where a view of something else gets its name."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.cumsum(0)
        z = y.cumsum(1)
        y = z.reshape(2, 12)
        w = y.cumsum(0)
        return (w + y).cumsum(1) * 2.0


def test_a_name_bound_anew_is_not_deleted() -> None:
    region = region_of(BoundAgain(), X, requires_grad=[False])
    compiled = compile_region(region, recompute="none")
    inputs = random_inputs(region)
    (result,), _ = compiled.code.forward(TP1, *inputs)
    assert torch.equal(result, reference(region, inputs)[0])
    lines = [line.strip().partition("  # ")[0] for line in compiled.source.splitlines()]
    place = lines.index("y = z.reshape(-1, 12)")
    assert lines[place + 1].startswith("w = ")
    assert "del z, y, w" in lines[place + 2 :]


class Wide(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, _, third = x.sin().split(2, -1)
        return first.cumsum(0), third.cumsum(0)


def test_what_the_caller_holds_is_not_deleted() -> None:
    compiled = compile_region(region_of(Wide(), X, requires_grad=[False]), recompute="none")
    deleted = [line.split() for line in compiled.source.splitlines() if line.strip()[:4] == "del "]
    names = {name.strip(",") for line in deleted for name in line[1:]}
    graph = compiled.partitioned.forward
    held = {compiled.text.names[node.name] for node in graph.output_node().all_input_nodes}
    assert names.isdisjoint({"x", *held})


class EarlyResult(nn.Module):
    """The first value that is called ``y`` is a result, which nothing reads before the end."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.cumsum(0)
        results = [y]
        y = x.cumsum(1)
        return *results, y.cumsum(0)


def test_a_result_keeps_its_name() -> None:
    region = region_of(EarlyResult(), X, requires_grad=[False])
    inputs = random_inputs(region)
    results, _ = compile_region(region, recompute="none").code.forward(TP1, *inputs)
    for result, true in zip(results, reference(region, inputs), strict=True):
        assert torch.equal(result, true)


class Corners(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        top, _ = x.split(2, 0)
        _, right = x.split(3, 1)
        return (top.cumsum(0) + right.cumsum(1)[:2, :1]).cumsum(0)


def test_unused_parts_behind_each_other_are_deleted_once() -> None:
    compiled = compile_region(region_of(Corners(), X, requires_grad=[False]), recompute="none")
    lines = [line.strip().partition("  # ")[0] for line in compiled.source.splitlines()]
    place = lines.index("top, _ = x.split(2)")
    assert lines[place + 1 : place + 3] == ["_, right = x.split(3, 1)", "del _"]
    (result,), _ = compiled.code.forward(TP1, X)
    assert torch.equal(result, Corners()(X))


@pytest.mark.parametrize("taken", [(), ("y",), ("y", "y_1")])
def test_a_name_with_another_meaning_is_not_taken(taken: tuple[str, ...]) -> None:
    graph = region_of(Again(), X, requires_grad=[False]).module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    parts = {node: [node] for node in nodes}
    lifetimes = Lifetimes(graph, parts, (), lambda _node: ["y"], {}, taken)
    (x,) = graph.find_nodes(op="placeholder")
    free = next(name for name in ("y", "y_1", "y_2", "y_3") if name not in taken)
    assert lifetimes.names[x] == free
    others = {lifetimes.names[node] for node in nodes}
    assert others.isdisjoint({free, *taken})
    assert len(others) == 1
