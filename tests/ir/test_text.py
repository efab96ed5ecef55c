"""The canonical text of a graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compiler.ir.text import render, render_dtype, render_type, render_value
from tests.helpers.graph_builder import GraphBuilder, aten, convert


def _block() -> Graph:
    b = GraphBuilder()
    x = b.input("x", 4, 4, placement="S(0)")
    w = b.input("weight", 6, 4, dtype=torch.bfloat16)
    gathered = b.call(convert, x, "S(0)", "R", 2, placement="R", recompute="save")
    y = b.call(aten.add.Tensor, gathered, 1.5)
    parts = b.call(aten.split_with_sizes.default, y, [1, 3], -1)
    first = b.call(operator.getitem, parts, 0, placement="P", recompute="recompute")
    return b.output(first, None, w)


GOLDEN = """\
%0 = placeholder[x] : f32[4, 4] @ S(0)
%1 = placeholder[weight] : bf16[6, 4]
%2 = sp_compiler.convert(%0, 'S(0)', 'R', 2) : f32[8, 4] @ R #save
%3 = aten.add.Tensor(%2, 1.5) : f32[8, 4]
%4 = aten.split_with_sizes(%3, [1, 3], -1) : (f32[8, 1], f32[8, 3])
%5 = getitem(%4, 0) : f32[8, 1] @ P #recompute
output(%5, None, %1)"""


def test_golden() -> None:
    assert render(_block()) == GOLDEN


def test_a_module_renders_as_its_graph() -> None:
    assert render(GraphModule({}, _block())) == GOLDEN


def test_only_the_metas_asked_for() -> None:
    lines = render(_block(), metas=("placement",)).splitlines()
    assert lines[0] == "%0 = placeholder[x] @ S(0)"
    assert lines[2] == "%2 = sp_compiler.convert(%0, 'S(0)', 'R', 2) @ R"
    assert (
        render(_block(), metas=()).splitlines()[4] == "%4 = aten.split_with_sizes(%3, [1, 3], -1)"
    )


def test_names_of_nodes_do_not_show() -> None:
    graph = _block()
    for node in graph.nodes:
        if node.op == "call_function":
            node.name = f"renamed_{node.name}"
    assert render(graph) == GOLDEN


def test_other_kinds_of_nodes() -> None:
    graph = Graph()
    x = graph.placeholder("x", default_value=None)
    weight = graph.get_attr("layer.weight")
    y = graph.call_method("view", (x, -1), {"dtype": torch.int64})
    z = graph.call_module("layer", (y,))
    graph.output(graph.call_function(torch.add, (z, weight)))
    assert render(graph).splitlines() == [
        "%0 = placeholder[x] = None",
        "%1 = get_attr[layer.weight]",
        "%2 = .view(%0, -1, dtype=torch.int64)",
        "%3 = module[layer](%2)",
        "%4 = torch.add(%3, %1)",
        "output(%4)",
    ]


def test_arguments_of_every_kind() -> None:
    values: list[Any] = [
        None,
        True,
        2,
        1e-5,
        "tanh",
        torch.bfloat16,
        torch.device("cpu"),
        torch.strided,
    ]
    values += [slice(0, None, 2), (1,), (), [None, [1]], {"a": (1, 2)}, aten.add.Tensor, ...]
    assert [render_value(value, str) for value in values] == [
        *("None", "True", "2", "1e-05", "'tanh'", "torch.bfloat16", "device(type='cpu')"),
        *("torch.strided", "slice(0, None, 2)", "(1,)", "()", "[None, [1]]", "{'a': (1, 2)}"),
        *("aten.add.Tensor", "Ellipsis"),
    ]


def test_no_memory_address_is_printed() -> None:
    assert render_value(object(), str) == "<object>"
    assert render_value(torch.zeros(2, 3), str) == "tensor f32[2, 3]"


def test_symbolic_sizes() -> None:
    traced = make_fx(lambda x: x.view(x.shape[0] * 2, -1), tracing_mode="symbolic")(
        torch.zeros(4, 6)
    )
    text = render(traced)
    assert text == render(traced.graph)
    assert "f32[s" in text
    assert " : s" in text  # aten.sym_size


def test_types() -> None:
    dtypes = [torch.float16, torch.uint8, torch.complex64, torch.bool, torch.float8_e4m3fn]
    assert [render_dtype(dtype) for dtype in dtypes] == [
        "f16",
        "u8",
        "c64",
        "bool",
        "float8_e4m3fn",
    ]
    assert render_type((torch.zeros(()), None, 3)) == "(f32[], None, 3)"
