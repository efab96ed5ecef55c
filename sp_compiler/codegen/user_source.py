"""Names of values in the user's source: the targets of the statement that computes them."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.*)')
_TORCH = f"{os.sep}torch{os.sep}"
_TORCH_MODULES = f"{_TORCH}nn{os.sep}modules{os.sep}"
# Evaluated in order, so that the n-th value is that of the n-th target.
_LISTED = (ast.Tuple, ast.List, ast.ListComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Statement:
    """A statement that binds names.

    Attributes:
        file: its file.
        line: its first line.
        targets: the names that it binds, "" for other targets.
        unpacks: whether ``targets`` unpack the value.
        listed: whether it has one expression per target.
        used: positions of the targets that later statements of the function use in computations.
    """

    file: str
    line: int
    targets: tuple[str, ...]
    unpacks: bool
    listed: bool
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frame:
    """A line of the user's model that was running."""

    file: str
    line: int

    @property
    def statement(self) -> Statement | None:
        """Return the only statement of this line that computes something, if it binds names."""
        return None if _TORCH in self.file else _bindings(self.file).get(self.line)


@functools.lru_cache(maxsize=4096)
def frames(stack_trace: str) -> tuple[Frame, ...]:
    """The lines of modules that made a value, outermost first; PyTorch's functions are left out."""
    return tuple(
        Frame(file, int(line))
        for file, line, _ in _FRAME.findall(stack_trace)
        if _TORCH not in file or _TORCH_MODULES in file
    )


@functools.lru_cache(maxsize=64)
def _bindings(file: str) -> dict[int, Statement | None]:
    """Return the statement of each line; ``None`` if a line has several, or one that binds
    nothing."""
    # Source files change while a process runs, and code comes from notebooks and exec.
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # not Python, or not what ran
        return {}
    statements: dict[int, Statement | None] = {}
    for node, function in _statements(tree):
        if body := getattr(node, "body", None):  # its head computes too
            statement, end = None, body[0].lineno - 1
        else:
            statement, end = _statement(file, node, function), node.end_lineno or node.lineno
        for line in range(node.lineno, max(end, node.lineno) + 1):
            statements[line] = statement if line not in statements else None
    return statements


def _statements(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.stmt, Any]]:
    """Every statement and the function that it is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node, function
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _statements(node, node if is_function else function)


def _statement(file: str, node: ast.stmt, function: ast.AST | None) -> Statement | None:
    target, value = None, getattr(node, "value", None)
    if isinstance(node, ast.Assign):
        # In a = b = x, the first target: both are the same value.
        target = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        target = node.target
    elif isinstance(node, ast.Expr) and isinstance(value, ast.NamedExpr):
        target, value = value.target, value.value
    if target is None or value is None:
        return None
    # A line number cannot distinguish the value from that of a walrus, or of a lambda run later.
    if any(isinstance(part, ast.NamedExpr | ast.Lambda) for part in ast.walk(value)):
        return None
    unpacks = isinstance(target, ast.Tuple | ast.List)
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    names = tuple(part.id if isinstance(part, ast.Name) else "" for part in parts)
    # In attn_output, attn_weights = ... the second is often only returned, or dropped.
    later = _computed_with(function, node.end_lineno or node.lineno) if unpacks else set()
    used = tuple(index for index, name in enumerate(names) if name in later)
    return Statement(file, node.lineno, names, unpacks, isinstance(value, _LISTED), used)


def _computed_with(function: ast.AST | None, line: int) -> set[str]:
    """Return names that ``function`` uses after ``line`` other than to return them."""
    names: set[str] = set()
    pending = [function] if function is not None else []
    for node in pending:  # the list grows
        if getattr(node, "end_lineno", line + 1) <= line:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            parts = list(node.value.elts)
        if isinstance(node, ast.Return):
            parts = [part for part in parts if not isinstance(part, ast.Name)]
        pending.extend(parts)
    return names
