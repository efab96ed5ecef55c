"""The commands on docs/command-line.md do what the page says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sp_compiler.command_line.app import app
from tests.docs.code_blocks import ROOT, blocks
from tests.helpers.tiny_llama import write_config


@pytest.mark.slow
def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    write_config(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    (shell,) = [b for b in blocks(ROOT / "docs" / "command-line.md") if b.language == "sh"]
    assert "--gpus 8" in shell.text
    # Of two: each number of ranks is compiled, with every setting of recomputation.
    for line in shell.text.replace("--gpus 8", "--gpus 2").splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "diff.html", "block.py"}
