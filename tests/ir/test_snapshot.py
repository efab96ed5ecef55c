"""Snapshots as graphs of networkx, for users who know no FX."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.placement import P, S
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.trace.export import capture


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return (y * y).sum()


@pytest.fixture
def snapshot() -> Snapshot:
    captured = capture(Squared(), (torch.randn(2, 4),), {})
    normalize(captured)
    snapshot = Snapshot.of_program("shard", outline(captured))
    (product,) = [node for node in snapshot.graphs["Model"].nodes if node.name == "up"]
    product.meta["placement"] = S(1)
    return snapshot


def test_nodes_say_what_they_are_and_where_they_came_from(snapshot: Snapshot) -> None:
    graph = snapshot.to_networkx()
    assert graph.graph == {"name": "shard", "calls": [("", "Model")]}
    product = dict(graph.nodes["Model/up"])
    assert "y = self.up(x)" in product.pop("source_line")
    assert product == {
        "graph": "Model",
        "op": "call_function",
        "target": "aten.linear",
        "shape": (2, 6),
        "dtype": "float32",
        "placement": "S(1)",
        "module": "up",
    }
    weight = graph.nodes["Model/up_weight"]
    assert (weight["op"], weight["shape"], weight["placement"]) == ("placeholder", (6, 4), "")
    assert graph.nodes["Model/output"]["shape"] is None


def test_edges_are_operands_in_their_positions(snapshot: Snapshot) -> None:
    graph = snapshot.to_networkx()
    assert isinstance(graph, nx.MultiDiGraph)
    edges = graph.in_edges("Model/up", data="position")
    assert {source: position for source, _, position in edges} == {
        "Model/x": 0,
        "Model/up_weight": 1,
    }
    (biased,) = graph.successors("Model/up")
    (squared,) = graph.successors(biased)
    assert [position for *_, position in graph.in_edges(squared, data="position")] == [0, 1]
    assert nx.ancestors(graph, "Model/up") == {"Model/x", "Model/up_weight"}
    assert nx.is_directed_acyclic_graph(graph)


def test_every_graph_is_a_part_of_its_own(snapshot: Snapshot) -> None:
    (graph,) = snapshot.graphs.values()
    names = ("Model.forward", "Model.backward")
    both = Snapshot("split", {name: copy_graph(graph) for name in names}).to_networkx()
    parts = list(nx.weakly_connected_components(both))
    assert [{both.nodes[node]["graph"] for node in part} for part in parts] == [{n} for n in names]
    assert len(both) == 2 * len(graph.nodes)


def test_partial_sums_are_found_by_their_placement(snapshot: Snapshot) -> None:
    (total,) = snapshot.graphs["Model"].output_node().all_input_nodes
    total.meta["placement"] = P
    found = [n for n, d in snapshot.to_networkx().nodes(data=True) if d["placement"] == "P"]
    assert found == [f"Model/{total.name}"]
