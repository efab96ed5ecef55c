"""Reports of the passes on full models, and where they decline."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph

from sp_compiler.base.pass_report import PassReport
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
