"""The commands on docs/command-line.md do what the page says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sp_compiler.command_line.app import app
from tests.docs.code_blocks import ROOT, blocks
from tests.helpers.shared_programs import shared_captures


@pytest.mark.slow
def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = blocks(ROOT / "docs" / "command-line.md")
    (config,) = [block.text for block in page if block.language == "json"]
    (shell,) = [block.text for block in page if block.language == "sh"]
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "--gpus 8" in shell
    # Of two: each number of ranks is compiled, with every setting of recomputation.
    with shared_captures():
        for line in shell.replace("--gpus 8", "--gpus 2").splitlines():
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "diff.html", "block.py"}
