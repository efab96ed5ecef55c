"""Equality of graphs up to the order of their nodes, against all orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch.fx import Graph, Node

from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.graph_theory import ComparableGraph, as_networkx, isomorphism

_aten = torch.ops.aten
# An operator (by its number of operands) and the positions of its operands among earlier values.
Recipe = Sequence[tuple[str, tuple[int, ...]]]
_TARGETS = {"sub": _aten.sub.Tensor, "relu": _aten.relu.default, "exp": _aten.exp.default}


def _graph(
    recipe: Recipe, order: Sequence[int] | None = None, outputs: tuple[int, ...] = ()
) -> Graph:
    """The graph of ``recipe``, whose calls are made in ``order``; ``outputs`` by position."""
    graph = Graph()
    made: dict[int, Node] = {}
    for index in order or range(len(recipe)):
        name, operands = recipe[index]
        args = tuple(made[operand] for operand in operands)
        made[index] = (
            graph.placeholder("x") if name == "input"
            else graph.create_node("call_function", _TARGETS[name], args)
        )  # fmt: skip
    graph.output(tuple(made[index] for index in outputs))
    return graph


def _label(node: Node) -> str:
    return f"{node.op} {node.target if node.op == 'call_function' else ''}"


def _is_isomorphism(twins: dict[Node, Node], first: Graph, second: Graph) -> bool:
    """Tell whether ``twins`` (node of ``second`` to node of ``first``) keeps labels and edges."""
    nodes = [[node for node in graph.nodes if node.op != "output"] for graph in (first, second)]
    returned = [set(graph.output_node().all_input_nodes) for graph in (first, second)]
    return (
        list(twins) != []
        and set(twins) == set(nodes[1])
        and set(twins.values()) == set(nodes[0])
        and {twins[node] for node in returned[1]} == returned[0]
        and all(
            _label(node) == _label(twin)
            and [twins[source] for source in tensor_operands(node)] == tensor_operands(twin)
            for node, twin in twins.items()
        )
    )


def _compare(first: Graph, second: Graph) -> dict[Node, Node] | None:
    return isomorphism(ComparableGraph(first, _label), ComparableGraph(second, _label))


def _random_recipe(rng: random.Random, num_inputs: int, num_calls: int) -> Recipe:
    recipe: list[tuple[str, tuple[int, ...]]] = [("input", ())] * num_inputs
    for _ in range(num_calls):
        name = rng.choice(list(_TARGETS))
        count = 2 if name == "sub" else 1
        recipe.append((name, tuple(rng.randrange(len(recipe)) for _ in range(count))))
    return recipe


def _random_order(rng: random.Random, recipe: Recipe) -> list[int]:
    left, order = set(range(len(recipe))), list[int]()
    while left:
        ready = [i for i in sorted(left) if left.isdisjoint(recipe[i][1])]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("seed", range(20))
def test_another_order_of_the_same_calls_is_found(seed: int) -> None:
    rng = random.Random(seed)
    recipe = _random_recipe(rng, 3, 25)
    outputs = tuple(rng.sample(range(len(recipe)), 2))
    first = _graph(recipe, outputs=outputs)
    second = _graph(recipe, _random_order(rng, recipe), outputs[::-1])
    twins = _compare(first, second)
    assert twins is not None
    assert _is_isomorphism(twins, first, second)


def _isomorphic_by_trying(first: Graph, second: Graph) -> bool:
    """Every bijection of the nodes."""
    one, other = ([n for n in graph.nodes if n.op != "output"] for graph in (first, second))
    return any(
        _is_isomorphism(dict(zip(other, twins, strict=True)), first, second)
        for twins in itertools.permutations(one)
    )


@pytest.mark.parametrize("seed", range(40))
def test_small_graphs_against_every_bijection(seed: int) -> None:
    """Two graphs that differ in one operand at most; about half of the pairs are isomorphic."""
    rng = random.Random(seed)
    recipe = [*_random_recipe(rng, 2, 4)]
    changed = list(recipe)
    index = rng.randrange(2, len(recipe))
    name, operands = changed[index]
    changed[index] = (name, (rng.randrange(index), *operands[1:]))
    first, second = _graph(recipe, outputs=(5,)), _graph(changed, outputs=(5,))
    assert (_compare(first, second) is not None) == _isomorphic_by_trying(first, second)


_X: tuple[str, tuple[int, ...]] = ("input", ())


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        # (relu(x) - exp(x)) and (exp(x) - relu(x)): arguments keep their places
        (
            [_X, ("relu", (0,)), ("exp", (0,)), ("sub", (1, 2))],
            [_X, ("relu", (0,)), ("exp", (0,)), ("sub", (2, 1))],
        ),
        # the same operators as often, otherwise wired
        (
            [_X, ("relu", (0,)), ("exp", (0,)), ("sub", (1, 1))],
            [_X, ("relu", (0,)), ("exp", (0,)), ("sub", (2, 2))],
        ),
        # two inputs, or one twice
        ([_X, _X, ("sub", (0, 1))], [_X, _X, ("sub", (0, 0))]),
    ],
)
def test_near_misses_are_no_isomorphisms(recipe: Recipe, other: Recipe) -> None:
    last = len(recipe) - 1
    assert _compare(_graph(recipe, outputs=(last,)), _graph(other, outputs=(last,))) is None


def test_what_is_returned_counts() -> None:
    recipe = [_X, ("relu", (0,)), ("relu", (1,))]
    assert _compare(_graph(recipe, outputs=(1,)), _graph(recipe, outputs=(2,))) is None


def test_interchangeable_branches_stay_together() -> None:
    """Four equal branches of two calls each: branches may swap, but none is torn apart."""
    recipe: list[tuple[str, tuple[int, ...]]] = [_X] * 4
    recipe += [("relu", (i,)) for i in range(4)] + [("exp", (4 + i,)) for i in range(4)]
    first = _graph(recipe, outputs=(8, 9, 10, 11))
    second = _graph(recipe, [3, 1, 0, 2, 6, 4, 7, 5, 9, 11, 10, 8], (8, 9, 10, 11))
    twins = _compare(first, second)
    assert twins is not None
    assert _is_isomorphism(twins, first, second)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [1, 0, 3, 2]])
def test_values_that_change_places_change_their_users(order: list[int]) -> None:
    """``x - y`` and ``y - x`` look alike from everywhere; only together may they be exchanged."""
    recipe = [_X, _X, ("sub", (0, 1)), ("sub", (1, 0))]
    first, second = _graph(recipe, outputs=(2, 3)), _graph(recipe, order, (2, 3))
    twins = _compare(first, second)
    assert twins is not None
    assert _is_isomorphism(twins, first, second)


def test_keyword_arguments_may_be_given_in_any_order() -> None:
    graphs = []
    for names in (("weight", "bias"), ("bias", "weight")):
        graph = Graph()
        x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
        given = {"weight": weight, "bias": bias}
        norm = graph.create_node(
            "call_function",
            _aten.layer_norm.default,
            (x, [4]),
            {name: given[name] for name in names},
        )
        graph.output((norm,))
        graphs.append(graph)
    label = lambda node: str(node.target)  # noqa: E731
    assert isomorphism(*(ComparableGraph(graph, label) for graph in graphs)) is not None


def test_an_operand_used_twice_has_two_edges() -> None:
    graph = _graph([_X, ("sub", (0, 0))], outputs=(1,))
    nodes = list(graph.nodes)[:2]
    result = as_networkx(nodes, lambda node: node.name, lambda node: {"op": node.op})
    assert [data["position"] for *_, data in result.edges(data=True)] == [0, 1]
    assert result.nodes[nodes[0].name] == {"op": "placeholder"}
