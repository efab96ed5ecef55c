"""Stages, differences and code that a compiled module shows."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import sp_compiler
from sp_compiler import ArgumentError, diff
from sp_compiler.graph_diff.data import Section
from sp_compiler.ir.compiled_program import CompiledProgram
from tests.helpers import parity
from tests.helpers.users import prepared

STAGES = [
    "export",
    "normalize",
    "outline",
    "shard",
    "joint",
    "simplify",
    "tag",
    "partition",
]  # of one rank; nothing overlaps there


@pytest.fixture(scope="module")
def module() -> Any:
    return prepared()


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    """GPT-2 for two ranks."""
    return parity.compiled(parity.case("gpt2", 2, 12), tp=2)


def test_stages_are_shown_in_order(module: Any) -> None:
    assert list(module.stages) == STAGES
    assert [path for path, _ in module.stages["final"].calls] == ["blocks.0", "blocks.1", ""]


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_differs_from_itself(module: Any, program: CompiledProgram, stage: str) -> None:
    assert module.diff(stage, stage).is_empty
    if stage in program.stages:
        assert diff(program.stages[stage], program.stages[stage]).is_empty


def test_stages_that_are_not_there(module: Any) -> None:
    with pytest.raises(ArgumentError, match=r"'begin'.*export, normalize, outline, shard"):
        module.diff("begin", "final")
    with pytest.raises(ArgumentError, match=r"'end'.*export, normalize, outline, shard"):
        module.diff("capture", "end")
    with pytest.raises(ArgumentError, match=r"did you mean 'capture'\? .* of capture, final"):
        module.diff("captured", "final")
    with pytest.raises(ArgumentError, match=r"did you mean 'Block'\? expected one of "):
        module.plan.block("Blok")


def test_one_rank_changes_tags_alone(module: Any) -> None:
    result = module.diff("capture", "final")
    assert not any(entry.collective for entry in result.entries)
    assert {entry.kind for entry in result.entries} == {"changed"}
    fields = {change.field for entry in result.entries for change in entry.changes}
    assert fields == {"recompute"}


def _sections(program: CompiledProgram) -> dict[str, Section]:
    result = diff(program.stages["capture"], program.stages["final"])
    assert not result.calls
    return {section.name: section for section in result.sections}


def test_capture_against_final_shows_exactly_the_collectives(program: CompiledProgram) -> None:
    """Besides them only reshapes between rows of tokens and (batch, sequence); nothing goes."""
    sections = _sections(program)
    collectives = {
        name: [entry.collective for entry in section.entries if entry.collective]
        for name, section in sections.items()
    }
    pairs = ["all_gather", "reduce_scatter"] * 2
    assert collectives == {
        "Prologue": ["reduce_scatter"],
        "GPT2Block": pairs,
        "Epilogue": ["all_gather"],
    }
    assert {name: section.count for name, section in sections.items()} == {
        "Prologue": 1,
        "GPT2Block": 2,
        "Epilogue": 1,
    }
    for section in sections.values():
        others = [e.op for e in section.entries if e.kind != "changed" and not e.collective]
        assert set(others) <= {"aten.reshape"}


def test_capture_against_final_shows_the_local_shapes(program: CompiledProgram) -> None:
    """Every shape that changes is halved, by a weight's columns or rows, by heads or by tokens."""
    sections = _sections(program)
    shapes = {
        entry.node: (change.before, change.after)
        for entry in sections["GPT2Block"].entries
        for change in entry.changes
        if change.field == "shape"
    }
    for before, after in shapes.values():
        assert prod(eval(before)) == 2 * prod(eval(after))
    expected = {
        "attn_c_attn_weight": ("[32, 96]", "[32, 48]"),
        "attn_c_proj_weight": ("[32, 32]", "[16, 32]"),
        "mlp_c_fc_weight": ("[32, 128]", "[32, 64]"),
        "mlp_c_proj_weight": ("[128, 32]", "[64, 32]"),
        "hidden": ("[2, 12, 32]", "[12, 32]"),
        "ln_1": ("[2, 12, 32]", "[12, 32]"),
        "scaled_dot_product_attention": ("[2, 4, 12, 8]", "[2, 2, 12, 8]"),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert not {"ln_1_weight", "attn_c_proj_bias"} & set(shapes)


def test_capture_against_final_shows_the_recompute_tags(program: CompiledProgram) -> None:
    """Saved are products of matrices, the attention's result and reduced values."""
    tags = {
        name: Counter(tag for entry in section.entries for tag in _tags(entry))
        for name, section in _sections(program).items()
    }
    assert {name: counts["save"] for name, counts in tags.items()} == {
        "Prologue": 1,
        "GPT2Block": 7,
        "Epilogue": 1,
    }
    for name in ("Prologue", "GPT2Block"):
        nodes = program.stages["final"].graphs[name].nodes
        assert tags[name] == Counter(n.meta["recompute"] for n in nodes if "recompute" in n.meta)
    # The loss became several operators; the results of some are saved.
    assert tags["Epilogue"]["save + recompute"] == 1
    kept = {e.op for e in _sections(program)["GPT2Block"].entries if "save" in _tags(e)}
    assert kept == {
        "aten.add.Tensor",
        "aten.matmul",
        "aten.scaled_dot_product_attention",
        "sp_compiler.convert",
    }


def _tags(entry: Any) -> list[str]:
    if entry.kind == "inserted":
        return [tag for tag in ("save", "recompute") if f"#{tag}" in entry.text]
    return [change.after for change in entry.changes if change.field == "recompute"]


def test_code_is_python_and_the_same_for_every_rank(program: CompiledProgram) -> None:
    compile(program.code, "generated", "exec")
    _, _legend, statements = program.code.split('"""', 2)
    assert "all_gather" in statements
    assert "rank" not in statements


def test_a_model_without_operators_has_stages_without_graphs() -> None:
    """It has no regions, and no difference either."""
    example: Any = ((torch.ones(2),), {})
    module: Any = sp_compiler.compile(nn.Identity(), tp=1, example_inputs=example)
    assert module.diff("capture", "final").is_empty
    with pytest.raises(ArgumentError, match="stage 'nothing'"):
        module.diff("nothing", "final")
