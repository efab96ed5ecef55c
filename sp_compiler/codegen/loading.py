"""Loading of generated code as a module, whose lines tracebacks show."""

from __future__ import annotations

import ast
import hashlib
import itertools
import linecache
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from sp_compiler.base.provenance import module_path, source_line

_numbers = itertools.count()
_FILE = "<sp_compiler "


@dataclass(frozen=True)
class Origins:
    """Where the statements of one class come from.

    Attributes:
        nodes: by the name of a value that a statement assigns, the nodes that compute it.
        layers: paths of the layers that the class runs; the nodes are those of the first.
    """

    nodes: Mapping[str, Sequence[Node]] = field(default_factory=dict)
    layers: Sequence[str] = ()

    def of(self, targets: Sequence[str]) -> str:
        """Return the module and line of the model that the last of the values ``targets`` comes
        from; "" if unknown."""
        places = [
            f"{self._module(module_path(node))}: {line}"
            for target in targets
            for node in self.nodes.get(target, ())
            if node.op == "call_function" and (line := source_line(node))
        ]
        return places[-1] if places else ""

    def _module(self, path: str) -> str:
        if len(self.layers) < 2:
            return path or "(model)"
        inner = path.removeprefix(self.layers[0]).removeprefix(".")
        return f"{inner} of one of {listed(self.layers)}".removeprefix(" of ")


class Namespace(dict[str, Any]):
    """The names of a generated module.

    Its functions keep it alive, and it keeps its lines in :mod:`linecache` while it lives.
    """

    __slots__ = ("__weakref__", "origins")
    origins: Mapping[str, Origins]


def load(source: str, origins: Mapping[str, Origins] | None = None) -> Namespace:
    """Execute generated text and return its names; tracebacks show its lines.

    ``origins``: by class, for the notes of errors.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    # Equal texts have separate entries, because one may live longer than another.
    filename = f"{_FILE}{digest} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = Namespace(__name__=f"sp_compiler.generated_{digest}")
    namespace.origins = origins or {}
    # Not at exit: linecache may be gone by then.
    weakref.finalize(namespace, linecache.cache.pop, filename, None).atexit = False
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def origin_of(error: BaseException) -> str:
    """Return where in the user's model the generated statement comes from that raised ``error``,
    and the statement; "" if it was raised elsewhere.

    For example ``"in mlp: model.py:12 x = self.up(x)\\nas line 70 of the generated code, in
    Block.forward: up = F.linear(...)"``. The first line is missing for code that a user has edited.
    """
    calls = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(_FILE)
    ]
    if not calls:
        return ""
    frame, line = calls[-1]
    name = frame.f_code.co_qualname
    statement = _statement(frame.f_code.co_filename, line)
    text = " ".join(ast.unparse(statement).split()) if statement else ""
    known: Mapping[str, Origins] = frame.f_globals.origins  # type: ignore[attr-defined]
    region = name.partition(".")[0]
    origin = known.get(region, Origins()).of(_targets(statement))
    generated = f"line {line} of the generated code, in {name}: {text}"
    # Backends compile several statements into one function, which may fail in any of them.
    where = "in or before" if f"= {region}." in text else "in"
    return f"{where} {origin}\nas {generated}" if origin else f"in {generated}"


def listed(paths: Sequence[str]) -> str:
    """Return the ``paths`` of layers as text, some of them if there are many."""
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]}, {paths[1]}, ... {paths[-1]}"


def _statement(filename: str, line: int) -> ast.stmt | None:
    """Return the innermost statement of generated text that contains ``line``."""
    tree = ast.parse("".join(linecache.getlines(filename)))
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return around[-1] if around else None  # ast.walk goes from the outside in


def _targets(statement: ast.stmt | None) -> list[str]:
    """Return the names that ``statement`` assigns."""
    if not isinstance(statement, ast.Assign):
        return []
    nodes = (node for target in statement.targets for node in ast.walk(target))
    return [node.id for node in nodes if isinstance(node, ast.Name)]
