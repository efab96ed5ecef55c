"""Text of others in generated code: whatever it is, it stays one name, comment or literal."""

from __future__ import annotations

import ast
import keyword
import random
from collections.abc import Iterator

import pytest

from sp_compiler.base.python_text import comment, docstring, identifier, string

_PIECES = (
    *(
        '"""',
        "'''",
        '"',
        "'",
        "\\",
        "\\\\",
        "\n",
        "\r",
        "\r\n",
        "\0",
        "\t",
        "\f",
        "\v",
        "\x1a",
        "\x7f",
    ),
    *(
        "\u2028",
        "\x85",
        "\ud800",
        "\udcff",
        "\ufeff",
        "\u202e",
        "\u00a0",
        "ﬁ",
        "é",
        "名",
        "🙂",
        "#",
        " ",
    ),
    *(
        "{",
        "}",
        "%s",
        "\\N{DASH}",
        "\\u00",
        "\\x",
        "\\\n",
        "__import__('os')",
        "\nraise SystemExit\n",
    ),
    *(
        "class",
        "None",
        "match",
        "print",
        "torch",
        "saved",
        "a",
        "B",
        "_",
        "0",
        "-",
        ".",
        "(",
        ")",
        ",",
    ),
)


def hostile_texts(number: int) -> Iterator[str]:
    """Deterministic, each of a few pieces that end, escape or continue something in Python."""
    draw = random.Random(0)
    for _ in range(number):
        yield "".join(draw.choices(_PIECES, k=draw.randint(0, 6)))


def test_ten_thousand_hostile_texts() -> None:
    """One module with all of them parses to exactly what they are: names, nothing, and strings."""
    texts = list(hostile_texts(10_000))
    lines = []
    for text in texts:
        lines += [f"def {identifier(text)}():"]
        lines += [f"    {line}" for line in docstring([text, f"x: {text}", text])]
        lines += [f"    {comment(text)}", f"    return {string(text)}  {comment(text)}"]
    source = "\n".join(lines)
    tree = ast.parse(source.encode())  # as a file would be read: every text can be encoded
    assert len(tree.body) == len(texts)
    for function, text in zip(tree.body, texts, strict=True):
        assert isinstance(function, ast.FunctionDef)
        documentation, result = function.body
        assert isinstance(documentation, ast.Expr)
        assert isinstance(documentation.value, ast.Constant)
        assert isinstance(result, ast.Return)
        assert ast.literal_eval(result.value or ast.Constant(None)) == text


@pytest.mark.parametrize("text", ["", " ", "__", "0", "é", "名", *keyword.kwlist, "match", "print"])
def test_what_is_no_name_becomes_one(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    assert not keyword.iskeyword(name)
    assert identifier(name) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attn.c_attn.weight", "attn_c_attn_weight"),
        ("0.weight", "_0_weight"),
        ("A-b", "A_b"),
        ("class", "class_"),
        ("sum", "sum_"),
        ("", "value"),
    ],
)
def test_names_stay_close_to_the_text(text: str, expected: str) -> None:
    assert identifier(text) == expected


def test_names_that_are_taken_are_left_alone() -> None:
    assert identifier("saved", {"saved"}) == "saved_"


def test_ordinary_text_is_printed_as_it_is() -> None:
    assert docstring(["Block: h.0.", "", "w: (2,) f32"]) == [
        '"""Block: h.0.',
        "",
        "w: (2,) f32",
        '"""',
    ]
    assert docstring(["Größe"]) == ['"""Größe"""']
    assert comment("attn.c_attn") == "# attn.c_attn"
    assert string("S(1|4,4)") == '"S(1|4,4)"'
