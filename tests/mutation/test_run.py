"""Tests that the runner of mutations takes, and what it is told to expect."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import pytest

from tests.mutation import run, score
from tests.mutation.mutants import ROOT, drawn, modules
from tests.mutation.swap import swap


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("sp_compiler/solve/pipeline_cut.py", ["tests/solve/test_pipeline_cut.py"]),
        ("sp_compiler/trace/masked_rows/rows.py", ["tests/trace/test_masked_rows.py"]),
        ("passes/memory/zero_tangents.py", ["tests/passes/memory/test_zero_tangents.py"]),
    ],
)
def test_tests_named_after_a_module_come_first(module: str, expected: list[str]) -> None:
    assert run.tests_of(module, ROOT, wide=False)[: len(expected)] == expected


def test_a_draw_is_the_same_every_time_and_reaches_every_folder() -> None:
    paths = [path for path in modules() if "solve" in path.parts or "base" in path.parts]
    draw = drawn(30, 1, paths)
    assert draw == drawn(30, 1, paths[::-1])
    assert draw != drawn(30, 2, paths)
    assert {mutant.path.split("/")[1] for mutant in draw} == {"solve", "base"}


@pytest.mark.usefixtures("nothing_frozen")
def test_loaded_functions_take_the_code_of_a_mutation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
LIMIT = 3

def inside(values):
    return [value for value in values if value < LIMIT]

class Adder:
    def __init__(self, step):
        self.step = step

    def to(self, value):
        return value + self.step
"""
    path = tmp_path / "mutated_here.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("mutated_here")
    inside, add = module.inside, module.Adder(2).to
    gc.freeze()
    assert swap(str(path), source, source.replace("< LIMIT", "<= LIMIT").replace("+", "-"))
    assert (inside([2, 3, 4]), add(5)) == ([2, 3], 3)
    assert not swap(str(path), source, source.replace("LIMIT = 3", "LIMIT = 4"))
    assert not swap(f"{path}.copy", source, source.replace("< LIMIT", "<= LIMIT"))


def test_known_survivors_are_still_there() -> None:
    for (path, before, _), reason in score.known_survivors().items():
        assert before in (ROOT / path).read_text(encoding="utf-8")
        assert reason
