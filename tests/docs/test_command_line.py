"""The commands on docs/command-line.md do what the page says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sp_compiler.command_line.app import app
from tests.docs.code_blocks import ROOT, blocks

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.slow
def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (shell,) = [b for b in blocks(ROOT / "docs" / "command-line.md") if b.language == "sh"]
    for line in shell.text.splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "diff.html", "block.py"}
