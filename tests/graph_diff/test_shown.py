"""Views of a comparison: kinds, totals, folds, unified text, columns, the page."""

from __future__ import annotations

import html
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.fx import Graph

from sp_compiler import diff
from sp_compiler.base.errors import ArgumentError
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.ops.registry import Collective
from tests.graph_diff.test_diff import captured, sharded
from tests.helpers.browser import dom_of, needs_browser
from tests.helpers.graph_builder import aten

_INPUTS: Any = ((torch.randn(2, 4),), {})


class _Layer(nn.Module):
    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(4, 8), nn.Linear(8, 4), act()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class _Stack(nn.Module):
    def __init__(self, *acts: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Layer, acts))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _exported(*acts: type[nn.Module]) -> Any:
    return torch.export.export(_Stack(*acts), *_INPUTS)


@pytest.fixture
def result() -> GraphDiff:
    calls = [(f"h.{layer}", "Block") for layer in range(48)]
    first = Snapshot("capture", {"Block": captured()}, calls)
    return diff(first, Snapshot("shard", {"Block": sharded()}, calls, kept={"Block": 100}))


def test_kinds_tell_collectives_from_other_insertions(result: GraphDiff) -> None:
    assert result.counts == {"unchanged": 1, "shape": 6, "placement": 7, "collective": 2}
    kinds = {entry.node: entry.kinds for entry in result.entries}
    assert kinds["relu_default"] == ("shape", "placement")
    assert kinds["convert_default"] == ("collective",)
    backwards = diff(sharded(), captured())
    assert backwards.counts["removed"] == 2


def test_totals_count_every_layer(result: GraphDiff) -> None:
    # Two products of (8, 4) by (4, 16) in full, and half of each on a rank.
    flops = 2 * 2 * 8 * 4 * 16
    assert (result.before.num_nodes, result.after.num_nodes) == (48 * 4, 48 * 6)
    assert (result.before.flops, result.after.flops) == (48 * flops, 48 * flops // 2)
    assert (result.before.kept_bytes, result.after.kept_bytes) == (None, 4800)
    full = 8 * 4 * 4
    assert result.after.collectives == (
        Collective("all_gather", 48, 48 * full),
        Collective("reduce_scatter", 48, 48 * full),
    )
    assert "48 all_gather of 6.00 KiB" in str(result.after)


def test_totals_of_a_graph_without_shapes() -> None:
    graph = torch.fx.symbolic_trace(_Stack(nn.ReLU)).graph
    totals = diff(graph, captured()).before
    assert (totals.num_nodes, totals.flops, totals.collectives) == (4, None, ())


def test_unified_text(result: GraphDiff) -> None:
    lines = result.to_unified(context=0).splitlines()
    assert lines[0].startswith("--- capture: 192 nodes, ")
    assert lines[1].startswith("+++ shard: 288 nodes, 48 all_gather of 6.00 KiB, 48 reduce_sc")
    assert lines[2] == "@@ Block x48: 2 inserted (2 collectives), 7 changed @@"
    assert lines[3:5] == [
        "-  %x = placeholder[x] : f32[8, 4]",
        "+  %x = placeholder[x] : f32[4, 4] @ S(0)",
    ]
    end = lines.index("Placements")
    assert lines[end - 2] == "   output(%add_tensor)"
    assert [line.split()[0] for line in lines[end + 1 :]] == ["S(i)", "P", "R"]


def test_both_sides_in_columns(result: GraphDiff) -> None:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(result.side_by_side())
    rows = capture.get().splitlines()
    (row,) = [row for row in rows if row.startswith("~ %act")]
    assert re.fullmatch(r"~ %act = .* : f32\[8, 16\] +%relu.* : f32\[8, 8\] @ S\(1\) *", row)
    (row,) = [row for row in rows if "all_gather >>" in row]
    assert row.startswith("+ " + " " * 40), "nothing stands on the left of an inserted node"
    assert [row.strip() for row in rows].count("Placements") == 1


def test_repeated_layers_of_a_flat_graph_are_shown_once() -> None:
    result = diff(_exported(*[nn.ReLU] * 12), _exported(*[nn.GELU] * 12))
    assert len(result.entries) == 12
    assert str(result).splitlines() == [
        "graph: 12 changed",
        "  ~ %gelu aten.gelu: target aten.relu -> aten.gelu",
        "    the same 11 times more, to %gelu_11",
    ]
    unified = result.to_unified(context=1)
    # The first layer and the last one have other neighbours than those between them.
    assert unified.count("= aten.gelu") == 3
    assert "... the same" in unified


def test_a_layer_that_differs_is_not_folded_with_the_others() -> None:
    acts = [nn.GELU] * 5 + [nn.SiLU] + [nn.GELU] * 6
    text = str(diff(_exported(*[nn.ReLU] * 12), _exported(*acts)))
    assert text.count("aten.relu -> aten.silu") == 1


def test_modules_are_captured_and_compared_layer_by_layer() -> None:
    first, second = _Stack(nn.ReLU, nn.ReLU, nn.ReLU), _Stack(nn.ReLU, nn.ReLU, nn.GELU)
    assert diff(first, first, example_inputs=_INPUTS).is_empty
    result = diff(first, second, example_inputs=_INPUTS)
    assert str(result) == (
        "_Layer3 (was _Layer2): 1 changed\n"
        "  ~ %gelu aten.gelu: target aten.relu -> aten.gelu\n"
        "~ call layers.2: _Layer2 -> _Layer3"
    )
    with pytest.raises(ArgumentError, match=r"_Stack that is not compiled.*example_inputs="):
        diff(first, second)


def _long_chain(layers: int, act: Any) -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(layers):
        for target in (aten.exp.default, aten.sin.default, act, aten.cos.default):
            x = graph.call_function(target, (x,))
    graph.output((x,))
    return graph


def test_what_a_call_gets_is_compared_where_its_kind_got_another_number() -> None:
    def stage(kind: str, graphs: dict[str, Graph], arguments: str) -> Snapshot:
        calls = [("h.0", "A"), ("h.1", kind)]
        return Snapshot("", graphs, calls, ["A(input 0)", f"{kind}({arguments})"])

    graph = _long_chain(1, aten.relu.default)
    first = stage("A2", {"A": graph, "A2": graph}, "input 1")
    graphs = {"A": graph, "A3": graph}
    assert diff(first, stage("A3", graphs, "input 1")).is_empty
    rewired = diff(first, stage("A3", graphs, "input 0"))
    assert rewired.calls == (("h.1", "A3(input 1)", "A3(input 0)"),)
    # Another class is no other number.
    other = diff(first, stage("B", {"A": graph, "B": graph}, "input 1"))
    assert other.calls == (("h.1", "A2", "B"),)


def test_a_renamed_parameter_is_one_short_line_for_all_layers(tmp_path: Path) -> None:
    def stage(name: str) -> Snapshot:
        weights = [f"param h.0.{each}.weight" for each in ("norm", "q", "k", "v", name, "down")]
        calls = [(f"h.{layer}", "Block") for layer in range(12)]
        block = f"Block({', '.join(weights)}, call 0.0)"
        return Snapshot(
            "", {"Block": captured()}, calls, [block.replace(".0", f".{i}") for i in range(12)]
        )

    result = diff(stage("up"), stage("expand"))
    assert len(result.calls) == 12
    lines = [
        "~ call h.0: Block(..., param h.0.up.weight, ...) -> "
        "Block(..., param h.0.expand.weight, ...)",
        "    the same 11 times more, to h.11",
    ]
    assert str(result).splitlines() == lines
    assert result.to_unified().splitlines()[2:] == lines
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(result.side_by_side())
    assert [line.rstrip() for line in capture.get().splitlines()[-2:]] == lines
    result.to_html(tmp_path / "diff.html")
    page = html.unescape((tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert all(line.strip() in page for line in lines)
    assert "h.3.up" not in page
    # Calls of other regions, too.
    other = Snapshot("", {"C": captured()}, [("h.0", "C")], ["C(param w)"])
    assert "~ call h.0: none -> C" in str(diff(stage("up"), other))


@pytest.mark.slow
def test_ten_thousand_nodes_take_seconds() -> None:
    first, second = (_long_chain(2500, act) for act in (aten.relu.default, aten.tanh.default))
    start = time.process_time()
    result = diff(first, second)
    text = str(result)
    assert time.process_time() - start < 20
    assert len(result.entries) == 2500
    assert "the same 2499 times more" in text


class _Rows(HTMLParser):
    """Kinds of the rows of a page, and addresses of anything that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        if "row" in classes:
            self.kinds += [name.removeprefix("k-") for name in classes if name != "row"]
        self.loaded += [values[name] or "" for name in ("src", "href") if name in values]


def test_page_has_every_node_and_loads_nothing(result: GraphDiff, tmp_path: Path) -> None:
    result.to_html(tmp_path / "diff.html")
    framed = result._repr_html_().split('"')[1]
    assert html.unescape(framed) == (tmp_path / "diff.html").read_text()
    rows = _Rows()
    rows.feed((tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert {kind: rows.kinds.count(kind) for kind in rows.kinds} == result.counts
    assert rows.loaded == ["data:,"]


def test_names_in_a_page_are_no_markup(tmp_path: Path) -> None:
    graph = captured()
    next(node for node in graph.nodes if node.name == "act").meta["stack_trace"] = (
        'File "model.py", line 3, in forward\n    return x <script>alert(1)</script>'
    )
    diff(graph, sharded()).to_html(tmp_path / "diff.html")
    assert "<script>alert" not in (tmp_path / "diff.html").read_text(encoding="utf-8")


@pytest.mark.slow
@needs_browser
def test_search_and_filter_in_a_browser(result: GraphDiff, tmp_path: Path) -> None:
    result.to_html(tmp_path / "diff.html")
    address = f"file://{tmp_path / 'diff.html'}"
    assert _shown(address) == "10 nodes"
    assert _shown(f"{address}#q=linear+w1") == "2 of 10 nodes"
    assert _shown(f"{address}#kinds=collective") == "2 of 10 nodes"
    assert _shown(f"{address}#q=all_gather&kinds=collective") == "1 of 10 nodes"


def _shown(address: str) -> str:
    """Return the page's text about how many nodes fit; fails if the console has an error."""
    (shown,) = re.findall(r'id="shown">([^<]*)<', dom_of(address))
    assert isinstance(shown, str)
    return shown
