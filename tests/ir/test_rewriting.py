"""The one way to make a node: its records, that nobody bypasses it; the one walk over graphs."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import networkx as nx
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from sp_compiler.ir.fx import ancestors, descendants, module_of, operands, reach, users
from sp_compiler.ir.rewriting import (
    copy_graph,
    insert_call,
    make_call,
    make_like,
    replace_call,
)

_ROOT = Path(__file__).parents[2]
_aten = torch.ops.aten
_MAKER = _ROOT / "sp_compiler" / "ir" / "rewriting.py"
_STACK = {"L['self']": ("", "M"), "L['self'].up": ("up", "Linear")}


def _relu_of_product() -> tuple[Graph, Node, Node]:
    """``relu(x * w)``, where ``w`` alone requires a gradient."""
    graph, mode = Graph(), FakeTensorMode()
    for name in ("x", "w"):
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(2, 3)
        node.meta["requires_grad"] = name == "w"
    x, w = graph.nodes
    graph.output((x,))
    product = insert_call(graph.output_node(), _aten.mul.Tensor, (x, w), origin="test")
    product.meta |= {"nn_module_stack": _STACK, "stack_trace": 'File "m.py", line 3, in f\n  y'}
    del product.meta["source"]  # as if it had been captured
    with graph.inserting_after(product):
        relu = make_call(graph, _aten.relu.default, (product,), like=product, origin="test")
    graph.output_node().args = ((relu,),)
    return graph, product, relu


def test_a_new_node_says_what_it_is_and_where_it_came_from() -> None:
    _, product, relu = _relu_of_product()
    assert relu.meta["val"].shape == (2, 3)
    assert relu.meta["requires_grad"]
    assert relu.meta["nn_module_stack"] is product.meta["nn_module_stack"]
    assert relu.meta["stack_trace"] == product.meta["stack_trace"]
    assert (relu.meta["origin"], relu.meta["source"]) == ("test", product.name)


def test_autograd_decides_what_requires_a_gradient() -> None:
    """Not the node that the new one serves: a comparison has no gradient."""
    _, product, relu = _relu_of_product()
    above = insert_call(relu, _aten.gt.Scalar, (product, 0.0), origin="test")
    assert not above.meta["requires_grad"]
    assert above.meta["val"].dtype is torch.bool
    assert not above.meta["val"].requires_grad


def test_a_replacement_takes_the_users_and_keeps_the_first_source() -> None:
    graph, product, relu = _relu_of_product()
    doubled = replace_call(relu, _aten.mul.Tensor, (product, 2.0), origin="second", name="relu")
    assert graph.output_node().args == ((doubled,),)
    assert relu not in graph.nodes
    assert (doubled.meta["origin"], doubled.meta["source"]) == ("second", product.name)


def test_what_the_caller_knows_is_not_computed() -> None:
    """A value is taken as it is given; origin and source are the maker's."""
    graph, product, relu = _relu_of_product()
    val = torch.empty(5, device="meta")
    meta = {"val": val, "placement": "S(0)", "origin": "other"}
    with graph.inserting_before(relu):
        node = make_call(graph, _aten.relu.default, (product,), like=relu, origin="test", meta=meta)
    assert node.meta["val"] is val
    assert (node.meta["placement"], node.meta["origin"]) == ("S(0)", "test")


def test_what_takes_the_place_of_a_node_has_all_of_its_meta() -> None:
    graph, product, _ = _relu_of_product()
    product.meta |= {"placement": "S(0)", "recompute": "save"}
    with graph.inserting_before(product):
        node = make_like(
            graph, _aten.div.Tensor, product.args, like=product, origin="twin", val=None
        )
    expected = {**product.meta, "origin": "twin", "val": None}
    assert node.meta == expected
    assert "source" not in node.meta  # as the product was captured


def _makes_a_node(node: ast.AST) -> bool:
    """``graph.call_function(...)`` and its like, not an interpreter's ``super().call_function``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    makers = ("create_node", "call_function", "call_method", "call_module")
    owner = node.func.value
    is_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
    return node.func.attr in makers and not is_super


def test_no_other_module_makes_call_nodes() -> None:
    files = [*(_ROOT / "sp_compiler").rglob("*.py"), *(_ROOT / "passes").rglob("*.py")]
    assert len(files) > 80
    makers = {
        str(file.relative_to(_ROOT))
        for file in files
        if any(map(_makes_a_node, ast.walk(ast.parse(file.read_text(encoding="utf-8")))))
    }
    # Graphs that a diff reads from texts have no node that theirs could stand for.
    assert makers == {str(_MAKER.relative_to(_ROOT)), "sp_compiler/graph_diff/code_graphs.py"}


@pytest.mark.parametrize(
    ("code", "makes"),
    [
        ("graph.call_function(f, (x,))", True),
        ("self.graph.create_node('call_function', f)", True),
        ("super().call_function(target, args, kwargs)", False),
        ("graph.node_copy(node)", False),  # provenance comes with it
        ("graph.placeholder('x')", False),  # no call
    ],
)
def test_the_search_sees_makers(code: str, makes: bool) -> None:
    assert any(map(_makes_a_node, ast.walk(ast.parse(code)))) is makes


def _random_graph(seed: int) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    for _ in range(20):
        picked = torch.randint(len(nodes), (2,), generator=generator).tolist()
        nodes.append(graph.call_function(_aten.add.Tensor, tuple(nodes[i] for i in picked)))
    graph.output((nodes[-1],))
    return graph


@pytest.mark.parametrize("seed", range(5))
def test_ancestors_and_descendants_are_those_of_graph_theory(seed: int) -> None:
    graph = _random_graph(seed)
    theory = nx.DiGraph((source, node) for node in graph.nodes for source in operands(node))
    theory.add_nodes_from(graph.nodes)
    for node in graph.nodes:
        assert ancestors([node]) == nx.ancestors(theory, node) | {node}
        assert descendants([node]) == nx.descendants(theory, node) | {node}


def test_a_walk_meets_the_nearest_first_and_ends_where_told() -> None:
    graph, product, relu = _relu_of_product()
    x, w = graph.find_nodes(op="placeholder")
    assert list(reach([relu], operands)) == [relu, product, x, w]
    assert list(reach([relu], operands, stop={product})) == [relu, product]
    assert list(reach([w], users)) == [w, product, relu, graph.output_node()]
    assert not reach([], users)


def test_a_copied_graph_shares_nothing_that_passes_change() -> None:
    graph, product, _ = _relu_of_product()
    copy = copy_graph(graph)
    assert [node.name for node in copy.nodes] == [node.name for node in graph.nodes]
    (twin,) = [node for node in copy.nodes if node.name == product.name]
    twin.meta["placement"] = "S(0)"
    assert "placement" not in product.meta


def test_a_module_has_no_text_before_it_is_run() -> None:
    """It then runs the graph as it is, which passes have changed."""
    graph, root = Graph(), nn.Module()
    root.register_buffer("two", torch.tensor(2.0))
    x, factor = graph.placeholder("x"), graph.get_attr("two")
    output = graph.output((x, factor))
    with mock.patch.object(Graph, "python_code", side_effect=AssertionError):
        module = module_of(graph, root, "Region")
    with graph.inserting_before(output):
        product = graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    output.args = ((product,),)
    assert module(torch.tensor(3.0)) == (torch.tensor(6.0),)
    assert type(module).__name__ == "Region"
    assert "mul" in module.code
