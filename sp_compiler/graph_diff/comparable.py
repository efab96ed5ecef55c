"""Conversion of everything comparable to graphs."""

from __future__ import annotations

import os
from functools import singledispatch
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from sp_compiler.base.errors import ArgumentError
from sp_compiler.compiler import to_program
from sp_compiler.graph_diff.code_graphs import code_graphs
from sp_compiler.ir.program import Program
from sp_compiler.ir.snapshot import Snapshot, Stages
from sp_compiler.options import CompileOptions
from sp_compiler.trace.arguments import ExampleInputs, checked_inputs
from sp_compiler.trace.export import capture

EXPECTED = (
    "a Module, compiled or with example_inputs, a stage of one, a Program, a Graph, GraphModule, "
    "ExportedProgram, or generated code as text or the path of a file"
)
# Name of the only graph of an argument without regions.
FLAT = ""


@singledispatch
def snapshot_of(value: Any, example_inputs: ExampleInputs | None) -> Snapshot:
    """Return the graphs of ``value``.

    Later folders register their own types.

    Raises:
        ArgumentError: an unknown type, or an uncompiled module without inputs.
    """
    raise ArgumentError(f"cannot compare a {type(value).__name__}; expected {EXPECTED}")


@snapshot_of.register
def _(value: Snapshot, example_inputs: ExampleInputs | None) -> Snapshot:
    return value


@snapshot_of.register
def _(value: Stages, example_inputs: ExampleInputs | None) -> Snapshot:
    return list(value.values())[-1]  # what runs


@snapshot_of.register
def _(value: Program, example_inputs: ExampleInputs | None) -> Snapshot:
    return Snapshot.of_program("program", value)


@snapshot_of.register(Graph)
def _(value: Graph, example_inputs: ExampleInputs | None) -> Snapshot:
    return Snapshot(type(value).__name__, {FLAT: value})


@snapshot_of.register(GraphModule)
@snapshot_of.register(ExportedProgram)
def _(value: Any, example_inputs: ExampleInputs | None) -> Snapshot:
    return Snapshot(type(value).__name__, {FLAT: value.graph})


@snapshot_of.register
def _(value: str, example_inputs: ExampleInputs | None) -> Snapshot:
    # Generated code has many lines: a single line is the path of a file.
    if value and "\n" not in value:
        return snapshot_of(Path(value), example_inputs)
    return Snapshot("code", code_graphs(value))


@snapshot_of.register
def _(value: Path, example_inputs: ExampleInputs | None) -> Snapshot:
    if not os.path.isfile(value):  # Path.is_file raises OSError if the name is too long
        raise ArgumentError(
            f"cannot compare '{value}': there is no such file; expected its path, or generated "
            "code as text, such as module.code"
        )
    return Snapshot(value.name, code_graphs(value.read_text(encoding="utf-8")))


@snapshot_of.register
def _(value: nn.Module, example_inputs: ExampleInputs | None) -> Snapshot:
    name = type(value).__name__
    if example_inputs is None:
        raise ArgumentError(
            f"cannot compare a {name} that is not compiled: "
            "pass example_inputs=(args, kwargs), or compile it first"
        )
    args, kwargs = checked_inputs(value, example_inputs)
    # Outlined, so that a model of 48 layers has one graph per distinct layer.
    program = to_program(capture(value, args, kwargs), CompileOptions())
    return Snapshot.of_program(name, program)
