"""Each page of ``docs/how-to`` is done, on a copy of the repository, as it is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT, Block, blocks, script

HOW_TO = ROOT / "docs" / "how-to"
NUM_FILES = {"rule": 2, "policy": 1, "pass": 2, "operator": 2, "backend": 1}
_COMMAND = "python -m pytest "
_ALL_PAGES = """
import json, runpy, sys, warnings
import pytest

scripts, commands = map(json.loads, sys.argv[1:])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for script in scripts:
        runpy.run_path(script, run_name="__main__")
# What is imported already cannot be rewritten, and need not be.
known = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
for command in commands:
    assert pytest.main([*command, *known]) == 0, command
"""
_COPIED = ("sp_compiler", "passes", "tests", "benchmarks", "docs")


def test_every_page_is_tried() -> None:
    assert {page.stem for page in HOW_TO.glob("*.md")} == {"README", *NUM_FILES}


@pytest.mark.parametrize(("name", "count"), NUM_FILES.items())
def test_number_of_files(name: str, count: int) -> None:
    touched = {block.path for block in blocks(HOW_TO / f"{name}.md") if block.path}
    assert len(touched) == count, touched


@pytest.mark.slow
def test_pages_do_what_they_say(tmp_path: Path) -> None:
    """All of them on one copy, for they change different places, and in one process."""
    for folder in _COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    commands, scripts = [], []
    for name in NUM_FILES:
        page = HOW_TO / f"{name}.md"
        for block in blocks(page):
            if block.action:
                _change(tmp_path / block.path, block)
        text = re.sub(r'zoo\.build\("(\w+)"\)', r'zoo.build("\1", layers=1)', script(page, ""))
        tmp_path.joinpath(f"page_{name}.py").write_text(text, encoding="utf-8")
        scripts.append(f"page_{name}.py")
        shell = "".join(block.text for block in blocks(page) if block.language == "sh")
        assert all(line.startswith(_COMMAND) for line in shell.splitlines())
        commands += [line.removeprefix(_COMMAND).split() for line in shell.splitlines()]
    assert len(commands) == 3
    tmp_path.joinpath("all_pages.py").write_text(_ALL_PAGES, encoding="utf-8")
    _run([sys.executable, "all_pages.py", json.dumps(scripts), json.dumps(commands)], tmp_path)


def _change(path: Path, block: Block) -> None:
    """Write the file, add to its end, or, for a diff, replace the lines of its context."""
    if block.action == "new":
        path.write_text(block.text, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    if block.action == "append":
        path.write_text(text + block.text, encoding="utf-8")
        return
    lines = block.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    assert text.count(before) == 1, f"{path}: {text.count(before)} times\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
