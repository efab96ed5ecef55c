"""The runner: what is run again and what is not, reports and stages of passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from sp_compiler.base.pass_report import Pass, PassReport, report_of, reporting
from sp_compiler.compiler import Compilation
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.runner import PassRunner
from tests.helpers import parity


def _graph() -> Graph:
    graph = Graph()
    graph.output((graph.call_function(torch.neg, (graph.placeholder("x"),)),))
    return graph


def grow(graph: Graph, count: int) -> None:
    """Add ``count`` placeholders, and say so."""
    for _ in range(count):
        graph.placeholder("y")
    report_of("grow").rewrote(count, kind="placeholder")


def test_reports_are_sums_over_the_runs_of_a_pass() -> None:
    run = PassRunner()
    for region, count in (("A", 2), ("B", 3)):
        run("grow", grow, _graph(), count, region=region)
    (report,) = run.reports
    assert (report.rewrites, report.kinds, report.node_delta) == (5, {"placeholder": 5}, 5)
    assert report.seconds > 0


def test_a_pass_that_another_tries_reports_nowhere() -> None:
    with reporting(PassReport("other")) as report:
        grow(_graph(), 2)
    assert report == PassReport("other")
    grow(_graph(), 2)  # nor outside of any


def test_once_runs_once_until_it_is_forgotten() -> None:
    run, graph = PassRunner(), _graph()
    for _ in range(2):
        run.once("grow", grow, graph, 1)
    assert len(graph.nodes) == 4
    run.forget_setting()
    run.once("grow", grow, graph, 1)
    assert len(graph.nodes) == 4
    run.forget_from("grow")
    run.once("grow", grow, graph, 1)
    assert len(graph.nodes) == 5


def test_graphs_are_kept_where_somebody_may_ask_for_them() -> None:
    found = parity.case("plain", 2, 12)
    for keeps in (True, False):
        run = PassRunner(keep_graphs=keeps)
        run("grow", grow, _graph(), 1, region=found.program.regions[0].name)
        assert bool(run.stages(found.program, found.program)) == keeps
        assert [report.name for report in run.reports] == ["grow"]


@pytest.mark.slow
def test_memory_settings_share_what_does_not_depend_on_them(monkeypatch: Any) -> None:
    found = parity.case("plain", 2, 12)
    compilation = Compilation(found.program, CompileOptions(tp=2))
    first = compilation.finish(CompileOptions(tp=2, recompute="none"))
    budget = CompileOptions(tp=2, recompute="auto", memory_budget="1GiB")
    second, third = compilation.finish(budget), compilation.finish(CompileOptions(tp=2))
    for one, other in ((first, third), (second, third)):
        shared = {report.name: report.seconds for report in other.reports}
        for report in one.reports:
            if report.name in (Pass.SHARD, Pass.JOINT, Pass.SIMPLIFY):
                assert report.seconds == shared[report.name]
    assert first.code != third.code
    assert third.code == parity.compiled(found, tp=2).code
