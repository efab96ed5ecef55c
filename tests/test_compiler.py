"""The order of the passes, and that everything that names one uses the same name."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import pytest

import sp_compiler
from sp_compiler.base.pass_report import Pass
from sp_compiler.compiler import build
from sp_compiler.cost.hardware import hardware_of
from sp_compiler.options import CompileOptions, Options
from sp_compiler.planning.planned_program import PlannedProgram
from tests.goldens import FOLDER
from tests.models import zoo

# Written by ``make goldens``, so that a new pass is a line of a text that is read in review.
_LINES = (FOLDER / "pass_order.txt").read_text(encoding="utf-8").splitlines()
ORDER = tuple(line.removesuffix(" (no graphs)") for line in _LINES)
WITH_GRAPHS = tuple(line for line in _LINES if " " not in line)
WHEN_ASKED_FOR = ("split_backward", "loss_only", "expert_parallel", "half_batches", "async_tp")
ON_A_GPU = ("fuse_attention",)


@functools.cache
def _program() -> PlannedProgram:
    model = zoo.build("plain", layers=1)
    # As many tokens as a head has features: there is nothing to scale.
    return build(model, (), zoo.inputs("plain", 2, 8), CompileOptions(tp=2))


def test_order_of_the_passes() -> None:
    program = _program()
    # A pass that no other module refers to needs no name in ``Pass``.
    named = tuple(name for name in ORDER if name in set(Pass))
    assert tuple(name for name in Pass if name not in (*WHEN_ASKED_FOR, *ON_A_GPU)) == named
    assert tuple(report.name for report in program.reports) == ORDER
    assert tuple(program.stages) == WITH_GRAPHS
    assert tuple(program.plan.seconds) == ORDER
    origins = {
        node.meta["origin"]
        for stage in program.stages.values()
        for graph in stage.graphs.values()
        for node in graph.nodes
        if "origin" in node.meta
    }
    assert origins <= {*ORDER}
    assert {"normalize", "shard", "overlap"} <= origins


def test_public_names_of_stages() -> None:
    stages = _program().stages
    for name, stage in (("capture", "outline"), ("final", "tag")):
        assert stages[name] == dataclasses.replace(stages[stage], name=name)
    assert "capture" not in list(stages)


@pytest.mark.parametrize("name", ["compile", "plan", "verify"])
def test_options_are_the_same_everywhere(name: str) -> None:
    """Written once: as types, as defaults; shown by the signature and explained by ``help``."""
    function = getattr(sp_compiler, name)
    parameters = inspect.signature(function).parameters
    defaults = CompileOptions()
    all_options = {field.name for field in dataclasses.fields(CompileOptions)}
    derived = {"tp", "ep", "divisible", "loss_only", "tables_apart"}
    derived |= {"split_backward", "layers_apart"}
    assert set(Options.__annotations__) == all_options - derived
    for option in Options.__annotations__:
        shown = parameters[option].default
        if option == "hardware":
            shown = hardware_of(shown)  # a name, which is read at once
        assert shown == getattr(defaults, option) or (option == "hints" and shown is None)
        assert f"\n    {option}: " in function.__doc__
    with pytest.raises(TypeError, match="sequence_paralel"):
        function(zoo.build("plain"), example_inputs=((), {}), tp=1, sequence_paralel=False)


def test_no_hints_may_be_said_in_words() -> None:
    plan = sp_compiler.plan(zoo.build("plain"), ((), zoo.inputs("plain")), tp=2, hints=None)
    assert plan.options["hints"] == {}
