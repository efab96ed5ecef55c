"""A compilation that fails leaves a script that fails alike, without the model."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler import ArgumentError, PassError, compiler
from sp_compiler.base.pass_report import UserPass
from sp_compiler.command_line.reproduce import reproduce
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.reproduction import reproducible
from sp_compiler.pass_manager.reproduction_script import script_text
from sp_compiler.verification.proof import prove_rules
from sp_compiler.verification.verify import Step

_FOLDER = "SP_COMPILER_DUMP"


@torch.library.custom_op("reproduction_test::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """Mixes the last dim, which the rule below denies."""
    return x - x.mean(-1, keepdim=True)


@center.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


center.register_autograd(lambda context, grad: center(grad))


class Model(nn.Module):
    """Has a buffer, whose values a script cannot guess."""

    scale: Tensor

    def __init__(self, operator: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(1, 2, 16))
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operator(self.up(x) * self.scale)).square().mean()


def broken(graph: torch.fx.GraphModule) -> int:
    """A pass with a bug."""
    relu = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[0]
    return len(relu.meta["layers"])


_INPUTS: Any = ((torch.randn(2, 4, 8),), {})


def _script(error: BaseException, root: Path) -> Path:
    """The script that the error names, which is the only one below ``root``."""
    (script,) = root.glob("*/reproduce.py")
    assert error.__notes__ == [f"To reproduce this error: python {script}"]
    return script


def _run(script: Path) -> dict[str, Any]:
    return runpy.run_path(str(script), run_name="__main__")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(_FOLDER, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_pass_of_the_users(folder: Path) -> None:
    with pytest.raises(PassError, match=r"\[broken\] raised KeyError: 'layers'") as caught:
        sp_compiler.plan(Model(), _INPUTS, tp=2, passes=[broken])
    script = _script(caught.value, folder)
    assert "Traceback" in (script.parent / "error.txt").read_text(encoding="utf-8")
    assert f"import {__name__}" in script.read_text(encoding="utf-8")
    with pytest.raises(PassError) as again:
        _run(script)
    assert str(again.value) == str(caught.value)


def test_a_rule_that_lies(folder: Path) -> None:
    """Its operator is found again, and what it computes is compared with numbers."""
    sp_compiler.rule(center, "...h -> ...h", linear="x")
    options = CompileOptions(tp=2)
    model, (args, kwargs) = Model(center), _INPUTS
    compiled = build(model, args, kwargs, options)
    proof = reproducible(model, args, kwargs, options, {})(prove_rules)
    with pytest.raises(PassError, match="reproduction_test::center") as caught:
        proof(Step.of(model, args, kwargs), options, compiled)
    with pytest.raises(PassError, match="reproduction_test::center"):
        _run(_script(caught.value, folder))


def test_an_assertion_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same script once the defect is gone."""

    def simplify(graph: Any) -> None:
        raise AssertionError("impossible")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "simplify", simplify)
        with pytest.raises(AssertionError) as caught:
            sp_compiler.plan(Model().to("meta"), _INPUTS, tp=2)
        script = _script(caught.value, folder)
        with pytest.raises(AssertionError, match="impossible"):
            reproduce(script.parent)
    _run(script)
    assert "not reproduced" in capsys.readouterr().out


def test_only_errors_that_no_argument_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError) as caught:
        sp_compiler.plan(Model(), _INPUTS, tp=2, recompute="auto", memory_budget=8)
    assert not hasattr(caught.value, "__notes__")
    monkeypatch.delenv(_FOLDER, raising=False)
    with pytest.raises(PassError) as caught_without_folder:
        sp_compiler.plan(Model(), _INPUTS, tp=2, passes=[broken])
    (note,) = caught_without_folder.value.__notes__
    assert "run with SP_COMPILER_DUMP=FOLDER" in note


def _nested() -> UserPass:
    def inside(graph: torch.fx.GraphModule) -> int:
        return broken(graph)

    return inside


def test_what_no_file_can_hold_is_said(folder: Path) -> None:
    with pytest.raises(PassError) as caught:
        sp_compiler.plan(Model(), _INPUTS, tp=2, passes=[_nested()])
    (note,) = caught.value.__notes__
    assert "the model itself is needed (" in note
    assert "pickle" in note


def test_definitions_of_a_script_without_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "train.py"
    source.write_text(
        '"""Trains."""\n'
        "from __future__ import annotations\n"
        "import torch\n"
        "RATE = 1e-3\n"
        'LIBRARY = torch.library.Library("mine", "DEF")\n'
        "@torch.no_grad()\n"
        "def mine(graph):  # a comment stays\n"
        "    return 0\n"
        "model = mine(3)\n"
        "op.register_fake(mine)\n"
        "train(model)\n",
        encoding="utf-8",
    )
    main = ModuleType("__main__")
    main.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def mine(graph: Any) -> int:
        return 0

    mine.__module__ = "__main__"
    text = script_text(PassError("mine", 'broke "it"'), [mine, torch.ops.aten.relu.default])
    compile(text, "reproduce.py", "exec")
    assert text.startswith('"""Reproduces PassError: [mine] broke \'it\'\n')
    assert text.index("from __future__") < text.index("import sys")
    for kept in ("RATE = 1e-3", "LIBRARY = ", "@torch.no_grad()\ndef mine", "a comment stays"):
        assert kept in text
    assert "op.register_fake(mine)" in text
    assert "train(model)" not in text
    assert "model = " not in text
