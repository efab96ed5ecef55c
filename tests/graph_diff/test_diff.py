"""The graph diff: exactly what changed, and nothing for what did not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch.fx import Graph, GraphModule

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.graph_diff.data import Change
from sp_compiler.graph_diff.diff import diff
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.ir.program import Call, Program, Ref, Region
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.snapshot import Snapshot
from tests.helpers.graph_builder import GraphBuilder, aten, convert


def captured() -> Graph:
    """Two layers with a residual, as captured."""
    b = GraphBuilder()
    x, w1, w2 = b.input("x", 8, 4), b.input("w1", 16, 4), b.input("w2", 4, 16)
    y = b.call(aten.linear.default, x, w1, name="fc1")
    y = b.call(aten.relu.default, y, name="act")
    y = b.call(aten.linear.default, y, w2, name="fc2")
    return b.output(b.call(aten.add.Tensor, y, x, name="residual"))


def sharded(*, sources: bool = True) -> Graph:
    """The same on one of two ranks, Megatron's way, with what the sharding pass writes."""
    b = GraphBuilder()
    source: Callable[[str], dict[str, str]] = lambda name: {"source": name} if sources else {}  # noqa: E731
    x = b.input("x", 4, 4, placement="S(0)")
    w1, w2 = b.input("w1", 8, 4, placement="S(0)"), b.input("w2", 4, 8, placement="S(1)")
    y = b.call(convert, x, "S(0)", "R", 2, placement="R", **source("fc1"))
    y = b.call(aten.linear.default, y, w1, placement="S(1)", **source("fc1"))
    y = b.call(aten.relu.default, y, placement="S(1)", **source("act"))
    y = b.call(aten.linear.default, y, w2, placement="P", **source("fc2"))
    y = b.call(convert, y, "P", "S(0)", 2, placement="S(0)", **source("fc2"))
    y = b.call(aten.add.Tensor, y, x, placement="S(0)", **source("residual"))
    return b.output(y)


def _forward() -> Graph:
    """The forward after the joint trace: decomposed, tagged, with a value kept for backward."""
    b = GraphBuilder()
    x = b.input("x", 4, 4, placement="S(0)")
    w1, w2 = b.input("w1", 8, 4, placement="S(0)"), b.input("w2", 4, 8, placement="S(1)")
    fc1, act, fc2 = ({"root": root, "recompute": "save"} for root in ("fc1", "act", "fc2"))
    y = b.call(convert, x, "S(0)", "R", 2, placement="R", root="fc1", recompute="recompute")
    kept = b.call(aten.mm.default, y, b.call(aten.t.default, w1, **fc1), placement="S(1)", **fc1)
    y = b.call(aten.relu.default, kept, placement="S(1)", **act)
    y = b.call(aten.mm.default, y, b.call(aten.t.default, w2, **fc2), placement="P", **fc2)
    y = b.call(convert, y, "P", "S(0)", 2, placement="S(0)", **fc2)
    y = b.call(aten.add.Tensor, y, x, placement="S(0)", root="residual")
    return b.output(y, kept)


def _backward() -> Graph:
    b = GraphBuilder()
    grad = b.input("grad", 4, 4)
    y = b.call(convert, grad, "S(0)", "R", 2)
    y = b.call(aten.mm.default, y, b.input("w2", 4, 8))
    return b.output(b.call(aten.mm.default, y, b.input("w1", 8, 4)))


_MEANINGS = """

Placements
  S(i)      sharded: each rank has its part of dim i; S(i|a,b): a part of each segment a, b of it
  P         partial: the value is the sum over the ranks
  R         replicated: the same on every rank, while its gradient is partial"""
SHARD_GOLDEN = """\
graph: 2 inserted (2 collectives), 7 changed
  ~ %x placeholder[x]: shape [8, 4] -> [4, 4]; placement none -> S(0)
  ~ %w1 placeholder[w1]: shape [16, 4] -> [8, 4]; placement none -> S(0)
  ~ %w2 placeholder[w2]: shape [4, 16] -> [4, 8]; placement none -> S(1)
  + %convert_default = sp_compiler.convert(%x, 'S(0)', 'R', 2) : f32[8, 4] @ R  << all_gather >>
      used by %linear_default
  ~ %linear_default aten.linear: shape [8, 16] -> [8, 8]; placement none -> S(1)
  ~ %relu_default aten.relu: shape [8, 16] -> [8, 8]; placement none -> S(1)
  ~ %linear_default_1 aten.linear: placement none -> P
  + %convert_default_1 = sp_compiler.convert(%linear_default_1, 'P', 'S(0)', 2) : \
f32[4, 4] @ S(0)  << reduce_scatter >>
      used by %add_tensor
  ~ %add_tensor aten.add.Tensor: shape [8, 4] -> [4, 4]; placement none -> S(0)"""

FINAL_GOLDEN = """\
Block.forward x48: 2 inserted (2 collectives), 8 changed
  ~ %x placeholder[x]: shape [8, 4] -> [4, 4]; placement none -> S(0)
  ~ %w1 placeholder[w1]: shape [16, 4] -> [8, 4]; placement none -> S(0)
  ~ %w2 placeholder[w2]: shape [4, 16] -> [4, 8]; placement none -> S(1)
  + %convert_default = sp_compiler.convert(%x, 'S(0)', 'R', 2) : f32[8, 4] @ R #recompute\
  << all_gather >>
      used by %mm_default
  ~ %mm_default aten.mm: target aten.linear -> aten.t + aten.mm; shape [8, 16] -> [8, 8]; \
placement none -> S(1); recompute none -> save
  ~ %relu_default aten.relu: shape [8, 16] -> [8, 8]; placement none -> S(1); \
recompute none -> save
  ~ %mm_default_1 aten.mm: target aten.linear -> aten.t + aten.mm; placement none -> P; \
recompute none -> save
  + %convert_default_1 = sp_compiler.convert(%mm_default_1, 'P', 'S(0)', 2) : \
f32[4, 4] @ S(0) #save  << reduce_scatter >>
      used by %add_tensor
  ~ %add_tensor aten.add.Tensor: shape [8, 4] -> [4, 4]; placement none -> S(0)
  ~ %output output: args ((%residual,)) -> ((%add_tensor, %mm_default))
+ added graph Block.backward x48
    3 nodes: aten.mm x2, sp_compiler.convert
    collectives: all_gather"""


def _final_stage() -> Snapshot:
    graphs = {"Block.forward": _forward(), "Block.backward": _backward()}
    return Snapshot("final", graphs, [(f"h.{layer}", "Block") for layer in range(48)])


@pytest.mark.parametrize("sources", [True, False])
def test_sharding_shows_collectives_shapes_and_placements(sources: bool) -> None:
    """With the passes' provenance and, by structure alone, without it."""
    assert str(diff(captured(), sharded(sources=sources))) == SHARD_GOLDEN + _MEANINGS


@pytest.mark.parametrize("make", [captured, sharded, _forward, _final_stage])
def test_nothing_differs_from_itself(make: Callable[[], Any]) -> None:
    result = diff(make(), make())
    assert result.is_empty
    assert result.entries == ()
    assert str(result) == "no difference"


def test_captured_against_final_forward_and_backward() -> None:
    stage = Snapshot("capture", {"Block": captured()}, _final_stage().calls)
    assert str(diff(stage, _final_stage())) == FINAL_GOLDEN + _MEANINGS
    assert str(diff(captured(), _final_stage())) == FINAL_GOLDEN + _MEANINGS
    assert str(diff(GraphModule({}, captured()), _final_stage())) == FINAL_GOLDEN + _MEANINGS


def test_the_other_way_round_removes() -> None:
    result = diff(_final_stage(), Snapshot("capture", {"Block": captured()}, _final_stage().calls))
    kinds = {section.name: section.kind for section in result.sections}
    assert kinds == {"Block": "changed", "Block.backward": "removed"}
    removed = [entry for entry in result.entries if entry.kind == "removed"]
    assert [entry.collective for entry in removed if entry.collective] == [
        "all_gather",
        "reduce_scatter",
    ]


def _binary(first: str = "x", second: str = "y", target: Any = aten.sub.Tensor) -> Graph:
    b = GraphBuilder()
    values = {"x": b.input("x", 2), "y": b.input("y", 2)}
    z = b.call(aten.exp.default, b.call(target, values[first], values[second], name="z"))
    return b.output(b.call(aten.sin.default, z))


def test_a_swapped_operand_shows_and_nothing_else() -> None:
    (entry,) = diff(_binary(), _binary("y", "x")).entries
    assert (entry.kind, entry.node) == ("changed", "z")
    assert entry.changes == (Change("args", "(%x, %y)", "(%y, %x)"),)


def test_another_operand_shows_and_nothing_else() -> None:
    (entry,) = diff(_binary(), _binary("x", "x")).entries
    assert entry.changes == (Change("args", "(%x, %y)", "(%x, %x)"),)


def test_another_operator_shows_and_nothing_else() -> None:
    (entry,) = diff(_binary(), _binary(target=aten.add.Tensor)).entries
    assert entry.changes == (Change("target", "aten.sub.Tensor", "aten.add.Tensor"),)


def _unary(edit: Callable[[Graph], object] = lambda graph: None) -> Graph:
    b = GraphBuilder()
    x = b.input("x", 2, 3, placement="R")
    y = b.call(aten.sum.dim_IntList, x, [1], True, placement="R", recompute="save", name="y")
    graph = b.output(b.call(aten.relu.default, y, name="z"), None)
    edit(graph)
    return graph


def _node(graph: Graph, name: str) -> Any:
    return next(node for node in graph.nodes if node.name == name)


def _set_meta(graph: Graph, **meta: Any) -> None:
    _node(graph, "y").meta.update(meta)


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (lambda g: _set_meta(g, placement=Placement.parse("P")), ("placement", "R", "P")),
        (lambda g: _set_meta(g, recompute="recompute"), ("recompute", "save", "recompute")),
        (lambda g: _set_meta(g, val=torch.empty(2)), ("shape", "[2, 1]", "[2]")),
        (lambda g: _set_meta(g, val=torch.empty(2, 1).half()), ("dtype", "f32", "f16")),
        (lambda g: _set_meta(g, val=3), ("value", "f32[2, 1]", "3")),
        (
            lambda g: _node(g, "y").update_arg(2, False),
            ("args", "(%x, [1], True)", "(%x, [1], False)"),
        ),
        (
            lambda g: _node(g, "y").update_arg(1, [0]),
            ("args", "(%x, [1], True)", "(%x, [0], True)"),
        ),
        (
            lambda g: _node(g, "y").update_arg(2, 1),
            ("args", "(%x, [1], True)", "(%x, [1], 1)"),
        ),
    ],
)
def test_each_property_shows(edit: Callable[[Graph], object], change: tuple[str, str, str]) -> None:
    (entry,) = diff(_unary(), _unary(edit)).entries
    assert (entry.kind, entry.node) == ("changed", "y")
    assert [(c.field, c.before, c.after) for c in entry.changes] == [change]


def test_output_that_was_none() -> None:
    def edit(graph: Graph) -> None:
        graph.output_node().args = ((_node(graph, "z"), _node(graph, "y")),)

    (entry,) = diff(_unary(), _unary(edit)).entries
    assert entry.changes == (Change("args", "((%z, None))", "((%z, %y))"),)


def test_how_a_call_is_written_is_no_difference() -> None:
    def edit(graph: Graph) -> None:
        node = _node(graph, "y")
        node.args, node.kwargs = (node.args[0],), {"keepdim": True, "dim": [1], "dtype": None}
        node.name = "other"

    assert diff(_unary(), _unary(edit)).is_empty


def test_a_moved_node_shows_as_such() -> None:
    def graph(*order: str) -> Graph:
        b = GraphBuilder()
        x = b.input("x", 2)
        targets = {"a": aten.exp.default, "b": aten.sin.default, "c": aten.cos.default}
        nodes = {name: b.call(targets[name], x, name=name) for name in order}
        return b.output(*(nodes[name] for name in "abc"))

    (entry,) = diff(graph("a", "b", "c"), graph("b", "c", "a")).entries
    assert (entry.node, entry.changes) == ("a", (Change("order", "after %x", "after %c"),))


def test_inserted_and_removed_nodes_in_a_long_chain() -> None:
    def chain(*targets: Any) -> Graph:
        b = GraphBuilder()
        x = b.input("x", 2)
        for target in targets:
            x = b.call(target, x)
        return b.output(x)

    exp, sin = aten.exp.default, aten.sin.default
    result = diff(chain(exp, exp, sin, exp, sin), chain(exp, sin, aten.neg.default, exp, sin))
    assert [(entry.kind, entry.op) for entry in result.entries] == [
        ("removed", "aten.exp"),
        ("inserted", "aten.neg"),
    ]


def test_json_round_trip() -> None:
    for result in (diff(captured(), captured()), diff(captured(), _final_stage())):
        assert GraphDiff.from_json(result.to_json()) == result
    assert json.loads(result.to_json())["sections"][0]["count"] == 48
    with pytest.raises(ArgumentError, match="to_json"):
        GraphDiff.from_json('{"sections": [{}], "calls": []}')


def test_markup_is_the_text_in_colour() -> None:
    result = diff(captured(), _final_stage())
    assert Text.from_markup(result.to_text(markup=True)).plain == str(result)
    console = Console(width=300, color_system=None)
    with console.capture() as capture:
        console.print(result)
    assert capture.get().rstrip() == str(result)


def test_the_compared_graphs_are_left_alone() -> None:
    first, second = captured(), sharded()
    texts = str(first), str(second)
    diff(first, second)
    assert (str(first), str(second)) == texts


def test_a_copy_is_independent_and_equal() -> None:
    graph = sharded()
    copy = copy_graph(graph)
    assert [node.name for node in copy.nodes] == [node.name for node in graph.nodes]
    _node(graph, "relu_default").meta["placement"] = Placement.parse("R")
    assert [entry.node for entry in diff(copy, graph).entries] == ["relu_default"]


def _program(graph: Graph, *argument_orders: tuple[int, ...]) -> Program:
    region = Region("Block", GraphModule({}, graph), ("input",) * 3, ("x", "w1", "w2"))
    calls = [
        Call(region, f"h.{layer}", tuple(Ref("input", index=index) for index in order))
        for layer, order in enumerate(argument_orders)
    ]
    return Program(calls, [], torch.utils._pytree.tree_structure(()))


def test_programs_are_compared_region_by_region() -> None:
    orders = (0, 1, 2), (0, 1, 2)
    result = diff(_program(captured(), *orders), _program(sharded(), *orders))
    assert str(result) == SHARD_GOLDEN.replace("graph:", "Block x2:") + _MEANINGS


def test_the_wiring_between_calls_is_compared() -> None:
    result = diff(_program(captured(), (0, 1, 2)), _program(captured(), (0, 2, 1)))
    assert str(result) == (
        "~ call h.0: Block(..., input 1, input 2) -> Block(..., input 2, input 1)"
    )


def test_another_region_in_a_layer_shows() -> None:
    graphs = {"A": _unary(), "B": _unary()}
    first = Snapshot("", graphs, [("h.0", "A"), ("h.1", "A"), ("h.2", "B")])
    second = Snapshot("", graphs, [("h.0", "A"), ("h.1", "B"), ("h.2", "B"), ("h.3", "B")])
    result = diff(first, second)
    assert result.calls == (("h.1", "A", "B"), ("h.3", "", "B"))
    assert result.counts == {"calls": 2}
    assert str(result) == "~ call h.1: A -> B\n~ call h.3: none -> B"


def test_a_kind_of_layer_that_got_another_number_is_compared_with_itself() -> None:
    a, b, c = captured(), captured(), _unary()
    next(node for node in b.nodes if node.name == "act").target = aten.gelu.default
    first = Snapshot("", {"A": a, "A2": c}, [("h.0", "A"), ("h.1", "A"), ("h.2", "A2")])
    graphs = {"A": a, "A2": b, "A3": c}
    result = diff(first, Snapshot("", graphs, [("h.0", "A"), ("h.1", "A2"), ("h.2", "A3")]))
    assert [section.name for section in result.sections] == ["A2 (was A)"]
    assert result.calls == (("h.1", "A", "A2"),)
    assert set(result.counts) == {"replaced", "unchanged", "calls"}
    # Layers that the other side has not got are told by name alone.
    assert not diff(first, Snapshot("", first.graphs, [("x.0", "A"), ("x.1", "A2")])).sections


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cannot compare 'graph': .*such as module\.code"):
        diff("graph", captured())
    two = Snapshot("", {"A": _unary(), "B": _unary()})
    with pytest.raises(ArgumentError, match=r"2 regions \(A, B\)"):
        diff(captured(), two)


def _random_graph(seed: int, size: int = 40) -> Graph:
    rng = random.Random(seed)
    b = GraphBuilder()
    values = [b.input(f"p{index}", 4) for index in range(3)]
    for _ in range(size):
        target, arity = rng.choice(
            [(aten.add.Tensor, 2), (aten.sub.Tensor, 2), (aten.exp.default, 1)]
        )
        values.append(b.call(target, *(rng.choice(values[-5:]) for _ in range(arity))))
    return b.output(*values[-3:])


@pytest.mark.parametrize("seed", range(30))
def test_any_single_edit_of_a_random_graph_shows_as_one_entry(seed: int) -> None:
    graph, edited = _random_graph(seed), _random_graph(seed)
    rng = random.Random(seed)
    subtractions = [
        node
        for node in edited.nodes
        if node.target is aten.sub.Tensor and node.args[0] is not node.args[1]
    ]
    node = rng.choice(subtractions)
    node.args = node.args[::-1]
    (entry,) = diff(graph, edited).entries
    assert (entry.node, [change.field for change in entry.changes]) == (node.name, ["args"])


@pytest.mark.parametrize("seed", range(30))
def test_an_inserted_collective_in_a_random_graph_shows_alone(seed: int) -> None:
    graph, edited = _random_graph(seed), _random_graph(seed)
    node = random.Random(seed).choice([n for n in edited.nodes if n.op == "call_function"])
    with edited.inserting_before(node):
        inserted = edited.call_function(convert, (node.args[0], "P", "I", 2))
    node.args = (inserted, *node.args[1:])
    (entry,) = diff(graph, edited).entries
    assert (entry.kind, entry.collective, entry.users) == ("inserted", "all_reduce", (node.name,))


def test_unrelated_graphs_are_compared_in_full() -> None:
    first, second = _random_graph(0), _random_graph(1)
    result = diff(first, second)
    assert not result.is_empty
    assert result == diff(first, second)
    num_inserted = sum(entry.kind == "inserted" for entry in result.entries)
    num_removed = sum(entry.kind == "removed" for entry in result.entries)
    assert len(second.nodes) - len(first.nodes) == num_inserted - num_removed
