"""Log and dump, asked for in the environment: a line per pass on stderr, all results as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sp_compiler
from sp_compiler import ArgumentError, plan
from sp_compiler.base.log import LOG

_INPUTS: Any = ((torch.randn(4, 8),), {})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    # As they were, for the tests after this one.
    monkeypatch.setattr(LOG, "handlers", [*LOG.handlers])
    monkeypatch.setattr(LOG, "level", LOG.level)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def test_a_line_for_each_pass_while_compiling(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(model, _INPUTS, tp=2)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SP_COMPILER_LOG", "info")
    for _ in range(2):  # a second compilation adds no second handler
        plan(model, _INPUTS, tp=2)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "sp_compiler: compiling Sequential for 2 ranks"
        assert sum(line.startswith("sp_compiler: export: ") for line in lines) == 1
        assert sum(line.startswith("sp_compiler: codegen: ") for line in lines) == 1


def test_a_later_call_says_what_it_compiles_for(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """A step takes seconds then, and must not look as if it hung; without being asked for."""
    caplog.set_level("WARNING", LOG.name)  # as it is where nobody configured it
    module = sp_compiler.compile(model, tp=1)
    module(torch.randn(4, 8))
    assert not caplog.messages
    module(torch.randn(6, 8))
    module(torch.randn(9, 8))
    sizes = "input float32 (6, 8), once for all other sizes: it takes about three times as long"
    padded = " as the first time; inputs padded to one size avoid it"
    module.eval()(torch.randn(6, 8))
    mode = "eval()"
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module(torch.randn(6, 8))
    frozen = "requires_grad of no parameter"
    changes = (sizes + padded, mode, frozen)
    said = [f"Sequential is compiled again for {what}" for what in changes]
    assert caplog.messages == said
    assert not LOG.handlers  # Python then writes warnings to stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_it(
    rank: int, model: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("WARNING", LOG.name)  # as it is where nobody configured it
    module = sp_compiler.compile(model, tp=1)
    module(torch.randn(4, 8))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    module(torch.randn(4, 8).requires_grad_())
    assert len(caplog.messages) == 1 - rank


def test_a_level_that_does_not_exist(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SP_COMPILER_LOG", "loud")
    with pytest.raises(ArgumentError, match="SP_COMPILER_LOG=loud: expected one of debug, info"):
        plan(model, _INPUTS, tp=2)


def test_a_folder_that_cannot_be_made(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SP_COMPILER_DUMP", str(tmp_path / "file" / "dump"))
    with pytest.raises(ArgumentError, match=r"SP_COMPILER_DUMP=.*no folder can be made there"):
        plan(model, _INPUTS, tp=2)


def test_every_compilation_is_kept_in_a_folder_of_its_own(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SP_COMPILER_DUMP", str(tmp_path))
    first = plan(model, _INPUTS, tp=2)
    monkeypatch.setenv("RANK", "1")
    plan(model, _INPUTS, tp=2)
    assert {path.name for path in tmp_path.iterdir()} == {"000", "rank1-000"}
    files = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "000").iterdir()}
    assert files["plan.txt"] == f"{first}\n"
    compile(files["code.py"], "code.py", "exec")
    stages = sorted(name for name in files if name[:2].isdigit())
    assert [name[3:-4] for name in stages][:4] == ["export", "normalize", "outline", "shard"]
    assert "sp_compiler.convert" in files[stages[3]]
    assert "# Placements\n# S(i) " in files[stages[3]]
    assert "sp_compiler.convert" not in files[stages[2]]
