"""The script that reproduces a failed compilation, with the user's own definitions."""

from __future__ import annotations

import ast
import platform
import site
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch._ops import OpOverload

_MAIN = "__main__"
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BUILT_IN = ("aten", "prims", "sp_compiler")


def script_text(error: Exception, used: Iterable[Any]) -> str:
    """Return the text of the script.

    Args:
        error: the error to reproduce.
        used: passes and operators whose modules the script imports. Definitions in the user's own
            script are copied, because importing it would run it.
    """
    names = {name: None for each in used for name in _modules_of(each)}
    future, definitions = _definitions() if _MAIN in names else ([], [])
    versions = ", ".join(f"{name} {version(name)}" for name in ("sp-compiler", "torch"))
    # Without the paths that an interpreter adds by itself.
    own = (sys.base_prefix, *site.getsitepackages())
    folders = [path for path in sys.path if path and not path.startswith(own)]
    imports = [f"import {name}  # noqa: F401" for name in sorted(names) if name != _MAIN]
    # Quotes would end the docstring, and a backslash escape what comes next.
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    message = message.replace("\\", "/").replace('"', "'")
    parts = [
        f'"""Reproduces {message}\n\n{versions}, Python {platform.python_version()}.\n"""',
        *future,
        f"import sys\nfrom pathlib import Path\n\nsys.path += {folders!r}",
        *definitions,
        *(["\n".join(imports)] if imports else []),
        "from sp_compiler.command_line.reproduce import reproduce\n\n"
        f'if __name__ == "{_MAIN}":\n'
        "    reproduce(Path(__file__).parent)\n"
        '    print("compiled without an error: not reproduced")',
    ]
    return "\n\n".join(parts) + "\n"


def _modules_of(used: Any) -> Iterator[str]:
    """Return names of the modules that define a pass or register an operator."""
    if not isinstance(used, OpOverload):
        # A pass may be an object with a ``__call__``.
        name = getattr(used, "__module__", None) or type(used).__module__
        yield name
    elif used.namespace not in _BUILT_IN:
        # The result of ``torch.library.custom_op`` has a name in the module that called it.
        owners = [
            name
            for name, module in list(sys.modules.items())
            # The main module may have a second name, which no other process knows.
            if (name == _MAIN or module is not sys.modules[_MAIN])
            and any(getattr(value, "_opoverload", None) is used for value in _values(module))
        ]
        # Operators in C++ come with a package that usually has the name of their namespace.
        yield from owners or [used.namespace] * (used.namespace in sys.modules)


def _values(module: Any) -> list[Any]:
    # Not ``dir``, which makes lazy modules import. Some entries are not modules at all.
    values = getattr(module, "__dict__", {}).values()
    return [value for value in values if type(value).__name__ == "CustomOpDef"]


def _definitions() -> tuple[list[str], list[str]]:
    """Return the definitions of the running script, with ``__future__`` imports first."""
    path = getattr(sys.modules[_MAIN], "__file__", None)
    if path is None:
        return [], ["# Put the definitions of the notebook here that the graph needs."]
    text = Path(path).read_text(encoding="utf-8")
    statements = [node for node in ast.parse(text).body if _is_definition(node)]
    future = [node for node in statements if getattr(node, "module", "") == "__future__"]
    sources = [_source(node, text) for node in statements if node not in future]
    title = f"# Definitions of {Path(path).name}, without what it runs; add what they need."
    return [ast.unparse(node) for node in future], [title, *sources]


def _source(node: ast.stmt, text: str) -> str:
    # A function's own first line comes after its decorators.
    decorators = getattr(node, "decorator_list", [])
    first = min(each.lineno for each in (node, *decorators))
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, _DEFINITIONS):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        # Registers the fake implementation of an operator, or its gradient.
        function = node.value.func
        return isinstance(function, ast.Attribute) and function.attr.startswith("register_")
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        try:
            ast.literal_eval(node.value)
        except ValueError:
            return "torch.library." in ast.unparse(node.value)
        return True
    return False
