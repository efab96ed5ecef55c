"""Private and patched names of torch and transformers in the product's own source."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

ROOT = Path(__file__).parents[2]
_LIBRARIES = ("torch", "transformers")
_STANDARD = (*_LIBRARIES, "sys")
_PRIVATE = re.compile(r"(^|\.)_(?!_)")


def sources() -> list[Path]:
    """Every module of the infrastructure and of the passes."""
    infrastructure = (ROOT / "sp_compiler").rglob("*.py")
    paths = {path for path in infrastructure if "passes" not in path.parts}
    return sorted(paths | set((ROOT / "passes").rglob("*.py")))


@functools.cache
def uses() -> dict[str, set[str]]:
    """Dotted name to the modules that use it.

    Of an import that is ``torch.utils._pytree.tree_map``, of an attribute ``torch._C._nn``, of a
    patch the name that is patched, private or not. Names under ``torch.ops`` are operators.
    """
    found: dict[str, set[str]] = {}
    for path in sources():
        nodes = _nodes(path)
        for name in (
            *_imported(nodes),
            *_read(nodes),
            *_patched(nodes),
            *_foreign(nodes),
            *_overridden(nodes),
        ):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """Everything in a module, itself first: each walk through all of them takes half a second."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def _own_names() -> frozenset[str]:
    """Private names that the product defines itself."""
    names: set[str] = set()
    for path in sources():
        nodes = _nodes(path)
        # A process group or dispatcher of ours has its methods' names from torch, which calls them.
        overriding = [
            node
            for node in nodes
            if isinstance(node, ast.ClassDef)
            and {"dist.ProcessGroup", "OpDispatcher"}.intersection(map(ast.unparse, node.bases))
        ]
        overridden = {id(method) for one in overriding for method in one.body}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if id(node) not in overridden:
                    names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                # Of attributes those of our own objects: ``self._graph = ...``.
                names.add(ast.unparse(node).removeprefix("self."))
    return frozenset(names)


def _foreign(nodes: list[ast.AST]) -> Iterator[str]:
    """Private attributes of objects that are not ours, such as ``._local_tensor``."""
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_|sp_)", node.attr):
            continue
        owner = ast.unparse(node.value)
        is_foreign = node.attr not in _own_names() and owner.split(".")[0] not in _STANDARD
        if is_foreign and not owner.endswith("aten"):
            yield f".{node.attr}"


def _overridden(nodes: list[ast.AST]) -> Iterator[str]:
    """Private methods that a class of ours has under the name of its base's in torch."""
    bases: dict[str, Any] = {"torch": torch}
    module_body = cast(ast.Module, nodes[0]).body
    for node in module_body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            module = importlib.import_module(str(node.module))
            bases |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            found: Any = bases.get(ast.unparse(base).split(".")[0])
            for part in ast.unparse(base).split(".")[1:]:
                found = getattr(found, part, None)
            for method in node.body:
                name = method.name if isinstance(method, ast.FunctionDef) else ""
                if re.match(r"_(?!_)", name) and hasattr(found, name):
                    yield f".{name}"


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in _LIBRARIES and _PRIVATE.search(name):
                yield name


def _read(nodes: list[ast.AST]) -> Iterator[str]:
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = ast.unparse(node)
            is_operator = name.startswith("torch.ops.aten")
            if name.split(".")[0] in _LIBRARIES and _PRIVATE.search(name) and not is_operator:
                yield name


def _patched(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mock.patch.object":
            owner, attribute = node.args[:2]
            yield f"{ast.unparse(owner)}.{ast.literal_eval(attribute)}"
        # A method of a class, which all of its objects have from then on: ``DTensor.__format__ =``.
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if found := re.fullmatch(r"[A-Z]\w*(\.__\w+__)", target):
            yield found[1]
