"""An operator that stands where another one stood is replaced, not removed and inserted."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph

from sp_compiler.graph_diff.diff import diff


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
