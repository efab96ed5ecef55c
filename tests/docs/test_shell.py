"""The shell commands of the pages: each is run by a test, or is one that CI runs."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.tasks import script_of
from tests.docs.code_blocks import ROOT, blocks
from tests.docs.test_pages import WRITTEN

# Others have a test of their own: test_command_line, test_how_to.
_ELSEWHERE = ("docs/command-line.md", "docs/how-to/")
_LONG = ("examples.train", "--write")
"""In commands that take hours or other machines; their options are compared with the help."""


def _commands() -> list[tuple[Path, str]]:
    found = []
    for page in WRITTEN:
        if page.relative_to(ROOT).as_posix().startswith(_ELSEWHERE):
            continue
        shell = "".join(block.text for block in blocks(page) if block.language == "sh")
        lines = shell.replace("\\\n", " ").splitlines()
        found += [(page, line.partition("  #")[0].strip()) for line in lines if line.strip()]
    return found


def _modules() -> list[str]:
    return [command for _, command in _commands() if " -m " in command]


def test_every_command_is_run() -> None:
    languages = {block.language for page in WRITTEN for block in blocks(page)}
    assert languages.isdisjoint({"bash", "shell", "console", "zsh"}), "no test runs these"
    for page, command in _commands():
        words = shlex.split(command)
        if words[0] == "make":  # by CI, or beside what it calls: test_commands_of_make_exist
            # Told which Python, it does not look for one.
            dry = [words[0], "-n", f"PYTHON={sys.executable}", *words[1:]]
            run = subprocess.run(dry, cwd=ROOT, capture_output=True)
            assert run.returncode == 0, command
        elif words[0] in ("python", "torchrun") and "-m" not in words:  # by test_tasks
            script = script_of(page)
            assert script is not None
            assert words[-1] == script.relative_to(ROOT).as_posix(), command
        else:
            assert command in _modules() or command == "pip install .", command


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", _modules())
def test_modules_run_as_they_are_printed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: importing torch again takes longer than most of them."""
    words = shlex.split(command)
    start = words.index("-m")
    is_long = any(word in words for word in _LONG)
    arguments = ["--help"] if is_long else words[start + 2 :]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [words[start + 1], *arguments])
    ended = pytest.raises(SystemExit) if is_long else contextlib.nullcontext()
    with ended as ending:
        runpy.run_module(words[start + 1], run_name="__main__", alter_sys=True)
    printed = capsys.readouterr().out
    if is_long:
        assert ending.value.code == 0
        known = set(re.findall(r"--[\w-]+", printed))
        assert known.issuperset(word for word in words[start:] if word.startswith("--"))
