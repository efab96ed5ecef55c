"""Generated code against generated code, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_compiler import diff
from sp_compiler.base.errors import ArgumentError
from sp_compiler.graph_diff.code_graphs import code_graphs
from sp_compiler.ir.text import render

CODE = '''"""Generated."""
import torch

aten_silu = torch.ops.aten.silu.default


class Block:
    """One."""

    @staticmethod
    def forward(tp, weight, x):
        # up
        h = aten_silu(x @ weight)  # (8, 4) f32
        y, rest = torch.split(tp.reduce_scatter(h, "P", "S(0)"), [2, -2], dim=1)
        del h
        for part in (y, rest):
            part.add_(1)
        return (y * 2.0 + rest.reshape(-1).to(torch.float32)[0],), (x,)

    @staticmethod
    def backward(tp, saved, grad):
        (x,) = saved
        return None, -grad * x
'''


def test_statements_are_nodes() -> None:
    graphs = code_graphs(CODE)
    assert list(graphs) == ["Block.forward", "Block.backward"]
    assert render(graphs["Block.forward"]).splitlines() == [
        "%0 = placeholder[tp]",
        "%1 = placeholder[weight]",
        "%2 = placeholder[x]",
        "%3 = matmul(%2, %1)",
        "%4 = aten.silu(%3)",
        "%5 = tp.reduce_scatter(%4, 'P', 'S(0)')",
        "%6 = torch.split(%5, [2, -2], dim=1)",
        "%7 = getitem(%6, 0)",
        "%8 = getitem(%6, 1)",
        "%9 = for part in (y, rest): part.add_(1)(%7, %8)",
        "%10 = mul(%7, 2.0)",
        "%11 = .reshape(%8, -1)",
        "%12 = .to(%11, 'torch.float32')",
        "%13 = getitem(%12, 0)",
        "%14 = add(%10, %13)",
        "output((%14,), (%2,))",
    ]


def test_an_edit_is_what_differs(tmp_path: Path) -> None:
    assert diff(CODE, CODE).is_empty
    # Names, comments and when values are freed are no differences.
    assert diff(CODE, CODE.replace("        del h\n", "").replace("y * 2", "y  *  2")).is_empty
    assert diff(
        CODE,
        CODE.replace("h = aten", "act = aten")
        .replace("er(h,", "er(act,")
        .replace("        del h\n", ""),
    ).is_empty
    edited = tmp_path / "edited.py"
    edited.write_text(CODE.replace("-grad * x", "-grad * x * 0.5"), encoding="utf-8")
    result = diff(CODE, edited)
    (entry,) = [entry for entry in result.entries if entry.kind == "inserted"]
    assert (entry.op, result.sections[0].name) == ("mul", "Block.backward")
    assert "0.5" in entry.text
    other = diff(CODE, CODE.replace('"P", "S(0)"', '"P", "S(1)"'))
    assert str(other).splitlines()[1].startswith("  ~ %reduce_scatter tp.reduce_scatter: args")


_HELPERS = """import torch

def helper(x, *more, factor=2.0):
    return x * factor + 1.0


class Block:
    @staticmethod
    def forward(tp, x, weight):
        f = lambda value: value * 4.0
        g = lambda value: value - weight
        special = torch.special
        return helper(f(x), g(x), special.expit(x))
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("x * factor", "x / factor", "helper"),
        ("factor=2.0", "factor=3.0", "helper"),
        ("value * 4.0", "value * 5.0", "Block.forward"),
        ("value - weight", "weight - value", "Block.forward"),
        ("= torch.special", "= torch", "Block.forward"),
        ("f(x), g(x)", "g(x), f(x)", "Block.forward"),
    ],
)
def test_an_edit_of_what_is_called_by_a_name_of_the_text(old: str, new: str, changed: str) -> None:
    result = diff(_HELPERS, _HELPERS.replace(old, new))
    assert [section.name for section in result.sections] == [changed]


@pytest.mark.parametrize(
    ("old", "new", "changed", "text"),
    [
        ("import torch\n", "import torch.fx as torch\n", "(module)", "import torch.fx as torch"),
        ("\n\nclass", "\n\ntorch.manual_seed(0)\n\nclass", "(module)", "torch.manual_seed(0)"),
        (
            "\n\nclass",
            "\n\nx = torch.manual_seed(0)\n\nclass",
            "(module)",
            "x = torch.manual_seed(0)",
        ),
        ("\n\nclass", "\n\ntorch = other\n\nclass", "(module)", "torch = other"),
        ("\n\nclass", "\n\nsizes = [4, 6]\n\nclass", "(module)", "sizes = [4, 6]"),
        ("class Block:\n", "class Block:\n    factor = 2.0\n", "Block.(class)", "factor = 2.0"),
        ("class Block:", "class Block(Layer):", "Block.(class)", "Layer"),
        ("class Block:", "@frozen\nclass Block:", "Block.(class)", "frozen"),
        (
            "    def forward",
            "    @torch.no_grad()\n    def forward",
            "Block.forward",
            "@torch.no_grad()",
        ),
        ("def helper", "@cache\ndef helper", "helper", "@cache"),
    ],
)
def test_an_edit_outside_of_functions(old: str, new: str, changed: str, text: str) -> None:
    result = diff(_HELPERS, _HELPERS.replace(old, new))
    assert [section.name for section in result.sections] == [changed]
    assert text in str(result)


def test_a_docstring_and_another_import_are_no_difference() -> None:
    head = '"""Edited."""\nimport math\nimport torch\nimport torch.nn.functional as F\n'
    edited = _HELPERS.replace("import torch\n", head)
    edited = edited.replace("class Block:\n", 'class Block:\n    """One."""\n\n')
    assert diff(_HELPERS, edited).is_empty


def test_the_name_of_what_is_called_is_no_difference() -> None:
    renamed = _HELPERS.replace("f = ", "scaled = ").replace("f(x)", "scaled(x)")
    renamed = renamed.replace("g = ", "moved = ").replace("g(x)", "moved(x)")
    assert diff(_HELPERS, renamed).is_empty


def test_what_is_no_generated_code(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"line 2: "):
        diff(CODE, "x = 1\ny = = 2")
    for text in ("model.pt", "/nowhere/code.py", 300 * "x"):
        with pytest.raises(ArgumentError, match=rf"'{text}': .*no such file.*such as module\.code"):
            diff(CODE, text)
    with pytest.raises(ArgumentError, match=r"the text 'x = 1\\n': expected generated code"):
        diff(CODE, "x = 1\n")
    with pytest.raises(ArgumentError, match=r"no such file"):
        diff(CODE, tmp_path / "none.py")
