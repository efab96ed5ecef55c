"""The notebook of ``examples/`` runs, and each cell shows what the file shows."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

_NOTEBOOK = Path(__file__).parents[2] / "examples" / "plans.ipynb"
# What a notebook asks an object for, by the kind of output in its file.
_SHOWN = {"text/html": "_repr_html_", "image/png": "_repr_png_"}


def _code_cells() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for cell in json.loads(_NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["outputs"]


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(_NOTEBOOK), "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), str(_NOTEBOOK), "eval"), names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cells_run_and_show_what_the_file_has() -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    names: dict[str, Any] = {}
    shown = set()
    for source, outputs in _code_cells():
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = _run(source, names)
        kinds = {kind for output in outputs for kind in output.get("data", ()) if kind in _SHOWN}
        shown |= kinds
        assert bool(printed.getvalue()) == any(
            output["output_type"] == "stream" for output in outputs
        )
        # An object may have a method that declines.
        methods = {kind: getattr(value, name, lambda: None) for kind, name in _SHOWN.items()}
        assert kinds == {kind for kind, method in methods.items() if method()}
    assert shown == set(_SHOWN)
