"""Reports of the passes on full models, and where they decline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

import sp_compiler
from sp_compiler.base.pass_report import PassReport, report_lines
from sp_compiler.ir.compiled_program import CompiledProgram
from tests.helpers import parity


def _reports(name: str, **options: Any) -> dict[str, PassReport]:
    program = parity.compiled(parity.case(name, 2, 12), **options)
    return {report.name: report for report in program.reports}


def test_counts_are_those_of_the_graphs() -> None:
    program = parity.compiled(parity.case("gpt2", 2, 12), tp=2)
    reports = {report.name: report for report in program.reports}
    graphs = list(program.stages["shard"].graphs.values())
    conversions = [n for graph in graphs for n in graph.nodes if n.name.startswith("convert")]
    assert reports["shard"].rewrites == len(conversions)
    saved = sum(len(region.partitioned.saved) for region in program.regions.values())
    assert reports["partition"].kinds["saved"] == saved
    waits = sum(n.name.endswith("_arrived") for g in _backwards(program) for n in g.nodes)
    assert reports["overlap"].rewrites == waits > 0
    assert reports["codegen"].kinds == {"line": program.code.count("\n")}
    deltas = {name: report.node_delta for name, report in reports.items()}
    assert deltas["simplify"] < 0 < deltas["partition"]
    assert deltas["check"] == deltas["tag"] == 0


def _backwards(program: CompiledProgram) -> list[Graph]:
    stage = program.stages["overlap"]
    return [graph for name, graph in stage.graphs.items() if "backward" in name]


def test_a_loss_over_a_split_vocabulary_is_not_recomputed() -> None:
    (item,) = _reports("gpt2", tp=2)["tag"].declined
    assert item.node == "vocab_nll"
    assert item.reason == "recomputed, it would communicate again"
    assert ".py:" in item.line


class _Uneven(nn.Module):
    """Two linears of one class and other sizes, and a collective with nothing to hide it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(16, 16, 3, padding=1)
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu().exp().transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_what_was_left_is_said_for_who_reads_no_graph() -> None:
    """By the user's own line, with whether to act; no names of nodes."""
    found = sp_compiler.plan(_Uneven(), ((torch.randn(2, 16, 6),), {}), tp=2)
    lines = [line.strip() for line in report_lines(found.passes)]
    left = [line for line in lines if line.startswith("left ")]
    apart = "left 1 x as it is: the layer differs from layers.0, and is compiled separately ("
    waits = "x as it is: ranks wait for the collective: no work that fits in memory is left to hide"
    assert any(line.startswith(apart) for line in left), left
    assert any(waits in line for line in left), left
    assert all("(test_reports.py:" in line or "first at test_reports" in line for line in left)
    assert (
        lines[-1]
        == "Parts that a pass left as they are run correctly, but may take more time or memory."
    )
    reasons = {tensor.op: tensor.reason for block in found.blocks for tensor in block.kept}
    assert reasons["convolution"] == "result of a convolution"
