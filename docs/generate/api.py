"""``docs/api.md``: what a user may use, from the docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sp_compiler
from sp_compiler.module.distributed_module import DistributedModule

PAGE = Path(__file__).parents[1] / "api.md"
_HEAD = """# API

Written by `python -m docs.generate --write` from the docstrings; not edited by hand.

Everything is imported from `sp_compiler`. `compile` returns a `DistributedModule`.
"""
_WIDTH = 90
_SECTIONS = ("Args", "Options", "Attributes", "Raises", "Returns", "Yields")
# Members inherited from libraries are documented there.
_OF_LIBRARIES = ("torch", "builtins", "collections", "dataclasses")


def page() -> str:
    """The text of the page."""
    public = {name: getattr(sp_compiler, name) for name in sp_compiler.__all__}
    errors = {name: value for name, value in public.items() if _is_error(value)}
    classes = {n: v for n, v in public.items() if inspect.isclass(v) and n not in errors}
    functions = {n: v for n, v in public.items() if n not in errors and n not in classes}
    parts = [_HEAD, "## Functions\n"]
    for name, function in functions.items():
        parts.append(_entry(f"sp_compiler.{name}", function))
    parts.append("## Classes\n")
    returned: dict[str, Any] = {"DistributedModule": DistributedModule, **classes}
    for name, cls in returned.items():
        parts += _class(name, cls)
    parts.append("## Errors\n\nAll of them are `SPCompilerError`.\n")
    for name, error in errors.items():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        parts.append(f"- **{name}** ({bases}): {_one_line(error)}")
    return "\n".join(parts).rstrip() + "\n"


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _class(name: str, cls: type) -> Iterator[str]:
    # Users get these objects from functions and do not construct them: no arguments are shown.
    about = re.split(r"^Args:$", inspect.getdoc(cls) or "", flags=re.MULTILINE)[0]
    # A class that adds ways to show its data has the attributes of its base.
    inherited = "".join(f"\n\n{text}" for base in cls.__mro__[1:] if (text := _attributes(base)))
    yield f"### {name}\n\n{_markdown(about.rstrip() + inherited)}\n"
    for member, value in inspect.getmembers_static(cls):
        if member.startswith("_") or not _is_ours(cls, member):
            continue
        if isinstance(value, property):
            yield f"- **`{member}`**: {_one_line(value)}"
        elif callable(getattr(cls, member)):
            method = getattr(cls, member)
            yield f"- **`{member}{_signature(inspect.signature(method))}`**: {_one_line(method)}"
    yield ""


def _attributes(cls: type) -> str:
    """The attributes in the docstring of a class of ours, as a section."""
    if _of_library(cls):
        return ""
    found = re.search(r"(?m)^Attributes:\n(?: .*\n?)+", inspect.getdoc(cls) or "")
    return found[0].rstrip() if found else ""


def _is_ours(cls: type, member: str) -> bool:
    """Return whether a class of ours defines the member and says what it is."""
    owner = next(base for base in cls.__mro__ if member in vars(base))
    value = vars(owner)[member]
    documented = bool(getattr(value, "__doc__", None)) and (
        isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
    )
    return documented and not _of_library(owner)


def _of_library(cls: type) -> bool:
    return cls.__module__.split(".")[0] in _OF_LIBRARIES


def _entry(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    call = f"{name}{_signature(signature)}"
    if len(call) > _WIDTH:
        lines = [f"    {_parameter(each)}," for each in signature.parameters.values()]
        if "    *," not in lines and "*, " in call:
            keyword = [p.kind is p.KEYWORD_ONLY for p in signature.parameters.values()]
            lines.insert(keyword.index(True), "    *,")
        call = "\n".join([f"{name}(", *lines, f") -> {signature.return_annotation}"])
    return f"### {name}\n\n```python\n{call}\n```\n\n{_markdown(inspect.getdoc(function) or '')}\n"


def _signature(signature: inspect.Signature) -> str:
    """On one line, without ``self``; annotations are strings, as they are written."""
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    texts = [_parameter(each) for each in parameters]
    kinds = [each.kind for each in parameters]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and inspect.Parameter.KEYWORD_ONLY in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return f"({', '.join(texts)}) -> {signature.return_annotation}"


def _parameter(parameter: inspect.Parameter) -> str:
    prefixes: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    stars = prefixes.get(parameter.kind, "")
    default = parameter.default
    text = f'"{default}"' if isinstance(default, str) else repr(default)
    suffix = "" if default is parameter.empty else f" = {text}"
    return f"{stars}{parameter.name}: {parameter.annotation}{suffix}"


def _one_line(value: Any) -> str:
    """The first paragraph of a docstring."""
    return " ".join(_references(inspect.getdoc(value) or "").split("\n\n")[0].split())


def _references(text: str) -> str:
    """``:func:`~a.b.c``` as `c`, and literals with one backtick."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def _markdown(docstring: str) -> str:
    """A docstring with Google's sections as lists."""
    lines: list[str] = []
    section = False
    # An example, up to the next blank line, is a block of code.
    docstring = re.sub(r"(?m)(^>>> .*(?:\n.+)*)", r"```python\n\1\n```", docstring)
    for line in _references(docstring).splitlines():
        head = re.fullmatch(rf"({'|'.join(_SECTIONS)}):", line)
        item = re.fullmatch(r"    (\S+(?:, \S+)*): (.*)", line)
        if head:
            section = True
            lines.append(f"**{head[1]}**\n")
        elif section and item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and not line
            lines.append(line)
    return textwrap.dedent("\n".join(lines)).rstrip()
