"""Reading of a HuggingFace ``config.json``, and advice if a path does not lead to one."""

from __future__ import annotations

import ast
import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from sp_compiler.base.errors import ArgumentError, did_you_mean
from sp_compiler.command_line.messages import Note, UsageError


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a ``config.json`` or of the one in the folder ``path``.

    Raises:
        UsageError: there is none.
        ArgumentError: ``path`` is Python, or it does not say which class to build.
    """
    # A likely mistake: other tools take a script or a module.
    if (python := _python_file(path)) is not None:
        # A module is imported from the current folder.
        folder = "" if python.resolve().is_relative_to(Path.cwd()) else f", in {python.parent}"
        raise ArgumentError(
            f"{path} is Python: expected {module_of(python)}:callable{folder}, a function without "
            f"arguments or a class{_callables_text(python)}"
        )
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise UsageError(
            f"no file {path}: expected package.module:callable, a HuggingFace config.json or a "
            "folder that has one, or --preset NAME"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{path} is not valid JSON: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    if isinstance(config, dict) and names is None and (name := _causal_model(config)):
        warnings.warn(Note(f'{path} has no "architectures": building {name}'), stacklevel=1)
        return {**config, "architectures": [name]}
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f'{path}: {_unknown_type(config)}it has no "architectures", a list with the class of '
            'transformers to build, such as ["LlamaForCausalLM"]'
        )
    assert isinstance(config, dict)
    return config


def _python_file(source: Path) -> Path | None:
    """Return the Python file that ``source`` means, by path or by module name, if any."""
    if (source / "config.json").exists():
        return None
    # Only in the current folder: an installed package of that name is hardly a model.
    module = source if source.is_dir() else Path(*str(source).split("."))
    files = (source, module / "__init__.py", Path(f"{module}.py"))
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def module_of(file: Path) -> str:
    """Return the name by which a file is imported from the current folder, or else from its own."""
    parts = [file.stem]
    with contextlib.suppress(ValueError):
        parts = [*file.resolve().relative_to(Path.cwd()).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _callables_text(file: Path) -> str:
    """Return the names of callables without arguments in a Python file, for an error message."""
    # Parsed, not imported: a script would run.
    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return ""
    names = [each.name for each in statements if _may_make_a_model(each)]
    found = " or ".join(f"{module_of(file)}:{name}" for name in names[:5])
    return found and f", such as {found}"


def _may_make_a_model(statement: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    """Return whether it defines a public function, or a class with a forward, that needs no
    arguments."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name[0] != "_" and not _needs_arguments(statement, given=0)
    if not isinstance(statement, ast.ClassDef):
        return False
    methods = {each.name: each for each in statement.body if isinstance(each, ast.FunctionDef)}
    own = methods.get("__init__")
    return "forward" in methods and (own is None or not _needs_arguments(own, given=1))


def _needs_arguments(function: ast.FunctionDef, *, given: int) -> bool:
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional > given or None in arguments.kw_defaults


def _causal_model(config: Mapping[str, Any]) -> str | None:
    """The class that ``AutoModelForCausalLM`` builds from ``config``. A configuration that was
    saved without a model does not name its class."""
    with contextlib.suppress(ImportError):
        from transformers.models.auto import modeling_auto

        names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        name: str | None = names.get(config.get("model_type"))
        return name
    return None


def _unknown_type(config: object) -> str:
    """Say that transformers has no such ``model_type``; "" if it has, or if none is given."""
    name = config.get("model_type") if isinstance(config, dict) else None
    with contextlib.suppress(ImportError):
        import transformers
        from transformers.models.auto import configuration_auto

        known = configuration_auto.CONFIG_MAPPING_NAMES
        if isinstance(name, str) and name not in known:
            version = f"transformers {transformers.__version__}"
            return f"{version} has no model_type {name!r}: {did_you_mean(name, known)}and "
    return ""
