"""Single operators as Python expressions."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sp_compiler.codegen.expressions import Printer
from sp_compiler.codegen.idioms import Idioms
from tests.helpers.graph_builder import GraphBuilder, aten


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cpu", "mask.to(torch.float32)"),
        ("cuda", "aten__to_copy(mask, dtype=torch.float32, device=device)"),
    ],
)
def test_a_cast_moves_its_operand_only_where_the_model_does(device: str, text: str) -> None:
    builder = GraphBuilder()
    mask = builder.input("mask", 3, dtype=torch.int64)
    cast = builder.graph.call_function(
        aten._to_copy.default,
        (mask,),
        {"dtype": torch.float32, "device": torch.device(device)},
    )
    with FakeTensorMode():
        cast.meta["val"] = torch.empty(3, device=device)
    graph = builder.output(cast)
    printer = Printer({mask: "mask", cast: "cast"}, Idioms(graph), {}, {})
    assert printer.expression(cast) == text
