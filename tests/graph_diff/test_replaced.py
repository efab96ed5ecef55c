"""An operator that stands where another one stood is replaced, not removed and inserted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from sp_compiler.graph_diff.diff import diff
from tests.helpers.graph_builder import GraphBuilder, aten


def _exported(norm: type[nn.Module], act: type[nn.Module]) -> Graph:
    model = nn.Sequential(nn.Linear(4, 8), norm(8), act(), nn.Linear(8, 4))
    return torch.export.export(model, (torch.randn(2, 4),)).graph


def _targets(first: Graph, second: Graph) -> list[tuple[str, str]]:
    result = diff(first, second)
    changes = [change for entry in result.entries for change in entry.changes]
    return [(each.before, each.after) for each in changes if each.field == "target"]


def test_an_operator_with_another_number_of_parameters() -> None:
    layer_norm, rms_norm = _exported(nn.LayerNorm, nn.GELU), _exported(nn.RMSNorm, nn.GELU)
    result = diff(rms_norm, layer_norm)
    assert result.counts == {"unchanged": 10, "replaced": 1, "inserted": 1}
    assert _targets(rms_norm, layer_norm) == [("aten.rms_norm", "aten.layer_norm")]
    assert _targets(layer_norm, rms_norm) == [("aten.layer_norm", "aten.rms_norm")]
    # The bias is no operator: both sides have as many.
    assert str(result).splitlines()[0] == "graph: 1 inserted (1 input), 1 changed"
    assert result.before.num_nodes == result.after.num_nodes == 4


def test_neighbours() -> None:
    old, new = _exported(nn.LayerNorm, nn.GELU), _exported(nn.RMSNorm, nn.SiLU)
    assert _targets(old, new) == [
        ("aten.layer_norm", "aten.rms_norm"),
        ("aten.gelu", "aten.silu"),
    ]


def _with_twins(first: Any) -> Graph:
    """An operator that may be equal to a later one, and what is computed from both."""
    b = GraphBuilder()
    x = b.input("x", 4)
    y = b.call(first, x, name="first")
    y = b.call(aten.mul.Tensor, b.call(aten.cos.default, y, name="of_first"), x, name="product")
    twin = b.call(aten.exp.default, x, name="twin")
    return b.output(y, b.call(aten.cos.default, twin, name="of_twin"))


def test_what_becomes_equal_to_another_takes_no_match_from_it() -> None:
    graphs = _with_twins(aten.sin.default), _with_twins(aten.exp.default)
    for one, other in (graphs, graphs[::-1]):
        result = diff(one, other)
        assert {kind: n for kind, n in result.counts.items() if kind != "unchanged"} == {
            "replaced": 1
        }


def test_names_do_not_outweigh_what_is_computed() -> None:
    """Two operators that trade places are moved, although each then has the other's name."""

    def graph(*numbers: int) -> Graph:
        b = GraphBuilder()
        x = b.input("x", 4)
        sums = [b.call(aten.add.Tensor, x, n, name=f"add_{i}") for i, n in enumerate(numbers)]
        return b.output(*sums)

    # Replaced is the output alone, which returns them in another order.
    assert diff(graph(1, 2), graph(2, 1)).counts == {"unchanged": 2, "moved": 1, "replaced": 1}
