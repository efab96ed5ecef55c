"""The page of the architecture lists every folder and every key of a node's ``meta``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.torch_internals import ROOT, sources
from tests.test_layout import LAYERS

_PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def _first_column(heading: str) -> list[str]:
    """The names in the table below ``heading``."""
    section = _PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_folders_in_their_order() -> None:
    assert tuple(_first_column("Folders")) == LAYERS


def test_every_key_of_meta() -> None:
    used = {key: path for path in sources() for key in _meta_keys(path)}
    listed = _first_column("What is in a node's `meta`")
    assert len(listed) == len(set(listed))
    assert set(listed) == set(used), used


def _meta_keys(path: Path) -> Iterator[str]:
    """Keys that are written out beside ``meta``, or in a tuple of keys of ``meta``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript) and _is_meta(node.value):
            yield from _texts(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _is_meta(node.func.value) and node.func.attr in ("get", "pop", "setdefault"):
                yield from _texts(node.args[0])
            elif _is_meta(node.func.value) and node.func.attr == "update":
                yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Compare) and any(map(_is_meta, node.comparators)):
            yield from _texts(node.left)
        elif isinstance(node, ast.Assign) and re.match(r"_.*(INHERITED|META)", _target(node)):
            yield from _texts(node.value)


def _is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def _target(node: ast.Assign) -> str:
    return ast.unparse(node.targets[0])


def _texts(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
