"""The scripts of ``docs/tasks`` run and print what their pages say."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from docs.generate.tasks import FOLDER, ROOT, script_of
from tests.docs.code_blocks import blocks
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.shared_programs import shared_captures

_PAGES = {script: page for page in sorted(FOLDER.glob("*.md")) if (script := script_of(page))}
_ON_RANKS = [s for s in _PAGES if "init_process_group" in s.read_text(encoding="utf-8")]
_ON_ONE = [script for script in _PAGES if script not in _ON_RANKS]
_FEWER_LAYERS = {
    "num_hidden_layers=2": "num_hidden_layers=1",
    "num_hidden_layers=4": "num_hidden_layers=2",
    "n_layer=4": "n_layer=2",
}
"""What the scripts print does not depend on it, numbers aside."""


def test_every_script_has_a_page_that_the_index_links() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    pages = [path for path in FOLDER.glob("*.md") if path.name != "README.md"]
    assert [page.name for page in pages if f"({page.name})" not in index] == []
    assert set(_PAGES) == {p for p in (ROOT / "examples/tasks").glob("*.py") if p.stem[0] != "_"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", _ON_ONE, ids=lambda script: script.stem)
def test_scripts_of_one_process(script: Path) -> None:
    with shared_captures():
        _assert_shown(script, _run(script))
    torch._dynamo.reset()


@pytest.mark.slow
def test_scripts_of_several_ranks() -> None:
    # All of them after one start: importing torch and transformers takes longer than each.
    scripts = [str(script) for script in _ON_RANKS]
    first, second = run_rehearsed(2, _run_all, scripts, rehearsal=_rehearsal)
    for script in _ON_RANKS:
        _assert_shown(script, first[str(script)] + second[str(script)])


def _rehearsal(scripts: list[str]) -> None:
    with mock.patch.multiple(dcp, save=mock.DEFAULT, load=mock.DEFAULT):
        for script in scripts:
            with contextlib.suppress(Exception):
                _run_all([script])


def _run_all(scripts: list[str]) -> dict[str, str]:
    warnings.simplefilter("ignore")
    # The runner has made the process group, and destroys it.
    with mock.patch.multiple(
        dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT
    ):
        return {script: _run(Path(script)) for script in scripts}


def _run(script: Path) -> str:
    text = script.read_text(encoding="utf-8")
    for printed, run in _FEWER_LAYERS.items():
        text = text.replace(printed, run)
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(output):
        copy = Path(folder, script.name)
        copy.write_text(text, encoding="utf-8")
        runpy.run_path(str(copy), run_name="__main__")
    return output.getvalue()


def _assert_shown(script: Path, output: str) -> None:
    """Return whether the script prints the lines of its page, numbers aside."""
    printed = set(map(_without_numbers, output.splitlines()))
    shown = [block.text for block in blocks(_PAGES[script]) if block.language == "text"]
    lines = [line for line in "".join(shown).splitlines() if line.strip() != "..."]
    assert lines
    assert [line for line in lines if _without_numbers(line) not in printed] == []


def _without_numbers(line: str) -> str:
    return " ".join(re.sub(r"\d[\d.]*(e[+-]\d+)?", "#", line).split())
