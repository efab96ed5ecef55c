"""Origin of a node in the user's model: its layer, its module, its source line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch.fx import Node

_INDEXED = re.compile(r"(^|\.)\d+$")
# Behind the key of a call in ``nn_module_stack``, which nodes that replace others inherit.
_UNLISTED = "@layer"
# A frame of a stack trace: where, and the code there, if it is known. Not those in graphs of
# Dynamo's: by their own name, for what a user types into IPython is in no file either.
_FRAME = re.compile(r'File "(?!<eval_with_key>).*(?:\n(?! *File ").*)?')


class ModuleCall(NamedTuple):
    """One call of a module, as in ``nn_module_stack``.

    Attributes:
        key: of no other call.
        path: of the module in the model.
        class_name: of the module, without the name of its Python module.
    """

    key: str
    path: str
    class_name: str


OUTSIDE = ModuleCall("", "", "")
"""Stands for what is in no layer."""


def is_layer(path: str) -> bool:
    """Return whether a module of this path is a layer, neither inside nor outside of layers."""
    *outside, last = path.split(".")
    return last.isdigit() and not any(map(str.isdigit, outside))


def is_indexed(path: str) -> bool:
    """Return whether the module of this path is one of a list."""
    return _INDEXED.search(path) is not None


def layer_of(node: Node) -> ModuleCall:
    """Return the use of a layer that ``node`` was captured in, or :data:`OUTSIDE`.

    A layer is the outermost module in an indexed container (a path ending in ``.N``), or, outside
    of those, one that :func:`mark_as_layers` was told of.
    """
    return layer_among(module_calls(node)) or OUTSIDE


def layer_among(
    stack: Iterable[ModuleCall], unlisted: Collection[str] = frozenset()
) -> ModuleCall | None:
    """Return the call of a layer among calls that are inside of each other, ``None`` if there is
    none.

    Args:
        stack: outermost first: a layer may hold indexed modules of its own, such as experts.
        unlisted: paths of modules in no list that are layers besides those marked.
    """
    for call in stack:
        if call.class_name == "ParametrizationList":  # indexed, but its modules compute a weight
            return None
        if is_indexed(call.path) or call.key.endswith(_UNLISTED) or call.path in unlisted:
            return call
    return None


def mark_as_layers(node: Node, paths: Collection[str]) -> None:
    """Let :func:`layer_of` take calls of modules with these paths for layers, also of the nodes
    that will replace ``node``."""
    stack = node.meta["nn_module_stack"]
    node.meta["nn_module_stack"] = {
        f"{call.key.removesuffix(_UNLISTED)}{_UNLISTED}" if call.path in paths else key: entry
        for call, (key, entry) in zip(module_calls(node), stack.items(), strict=True)
    }


def module_calls(node: Node) -> Iterator[ModuleCall]:
    """Yield the calls of modules that ``node`` was captured in, outermost first."""
    for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
        # torch.export writes the class as text, Dynamo as the class itself.
        name = module_class if isinstance(module_class, str) else module_class.__name__
        # "@1" marks the second call of a module that is called twice.
        yield ModuleCall(str(key), path.split("@")[0], name.rsplit(".", 1)[-1])


def node_origin(node: Node) -> str:
    """Return the module path and source line in the user's model of ``node``, for error
    messages."""
    path = module_path(node)
    # The innermost frame of the user's: torch.cond traces a graph of Dynamo's.
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    line = "\n    ".join(part.strip() for part in frames[-1].splitlines()) if frames else ""
    return f"  module: {path or '(model)'}\n    {line}".rstrip()


def source_line(node: Node) -> str:
    """Return the line of the user's model for ``node``, as "file.py:12 code"; "" if unknown.

    The innermost frame that is not PyTorch's own.
    """
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.*)', trace)
    # The model may end in a function of torch, such as F.linear; its caller is what a user knows.
    users = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame[0]]
    if not frames:
        return ""
    file, number, code = (users or frames)[-1]
    return f"{os.path.basename(file)}:{number} {code.strip()}"


def module_path(node: Node) -> str:
    """Dotted path of the innermost module of the user's model that produced ``node``; "" at top."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():  # outermost first
        path = entry[0]
    # "@1" is the second call of a module that is called twice.
    return path.split("@")[0].removeprefix("L['self']").lstrip(".")
