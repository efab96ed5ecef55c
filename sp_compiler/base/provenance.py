"""Origin of a node in the user's model: its layer, module and source line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch.fx import Node

_INDEXED = re.compile(r"(^|\.)\d+$")
# Suffix of the key of a call in ``nn_module_stack``, which replacements of a node inherit.
_UNLISTED = "@layer"
# A frame of a stack trace: its location, and the code there, if known. Frames in graphs of Dynamo
# are excluded by their name; code that a user types into IPython is not in a file either.
_FRAME = re.compile(r'File "(?!<eval_with_key>).*(?:\n(?! *File ").*)?')


class ModuleCall(NamedTuple):
    """One call of a module, as in ``nn_module_stack``.

    Attributes:
        key: unique key of the call.
        path: path of the module in the model.
        class_name: class of the module, without the name of its Python module.
    """

    key: str
    path: str
    class_name: str


OUTSIDE = ModuleCall("", "", "")
"""Stands for nodes outside of layers."""


def is_layer(path: str) -> bool:
    """Return whether a module of this path is itself a layer, not one inside of a layer."""
    *outside, last = path.split(".")
    return last.isdigit() and not any(map(str.isdigit, outside))


def is_indexed(path: str) -> bool:
    """Return whether the module of this path is an item of a list."""
    return _INDEXED.search(path) is not None


def layer_of(node: Node) -> ModuleCall:
    """Return the call of the layer in which ``node`` was captured, or :data:`OUTSIDE`.

    A layer is the outermost module in an indexed container (a path ending in ``.N``), or, outside
    of those, one that :func:`mark_as_layers` has marked.
    """
    return layer_among(module_calls(node)) or OUTSIDE


def layer_among(
    stack: Iterable[ModuleCall], unlisted: Collection[str] = frozenset()
) -> ModuleCall | None:
    """Return the call of a layer among nested calls, ``None`` if there is none.

    Args:
        stack: outermost first, since a layer may contain indexed modules, such as experts.
        unlisted: paths of modules outside of lists that are layers, in addition to those marked.
    """
    for call in stack:
        if call.class_name == "ParametrizationList":  # indexed, but its modules compute a weight
            return None
        if is_indexed(call.path) or call.key.endswith(_UNLISTED) or call.path in unlisted:
            return call
    return None


def mark_as_layers(node: Node, paths: Collection[str]) -> None:
    """Mark calls of modules with these paths as layers for :func:`layer_of`, for ``node`` and for
    the nodes that will replace it."""
    stack = node.meta["nn_module_stack"]
    node.meta["nn_module_stack"] = {
        f"{call.key.removesuffix(_UNLISTED)}{_UNLISTED}" if call.path in paths else key: entry
        for call, (key, entry) in zip(module_calls(node), stack.items(), strict=True)
    }


def module_calls(node: Node) -> Iterator[ModuleCall]:
    """Yield the calls of modules in which ``node`` was captured, outermost first."""
    for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
        # torch.export stores the name of the class, Dynamo the class itself.
        name = module_class if isinstance(module_class, str) else module_class.__name__
        # "@1" marks the second call of a module that is called twice.
        yield ModuleCall(str(key), path.split("@")[0], name.rsplit(".", 1)[-1])


def node_origin(node: Node) -> str:
    """Return the module path and source line in the user's model of ``node``, for error
    messages."""
    path = module_path(node)
    # The innermost user frame: torch.cond traces a graph of Dynamo.
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    line = "\n    ".join(part.strip() for part in frames[-1].splitlines()) if frames else ""
    return f"  module: {path or '(model)'}\n    {line}".rstrip()


def source_line(node: Node) -> str:
    """Return the line of the user's model for ``node``, as "file.py:12 code"; "" if unknown.

    It is the line of the innermost frame outside of PyTorch.
    """
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.*)', trace)
    # The innermost frame may be a function of torch, such as F.linear; a user knows its caller.
    users = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame[0]]
    if not frames:
        return ""
    file, number, code = (users or frames)[-1]
    return f"{os.path.basename(file)}:{number} {code.strip()}"


def module_path(node: Node) -> str:
    """Return the path of the innermost module of the model that made ``node``; "" for the model."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():  # outermost first
        path = entry[0]
    # "@1" is the second call of a module that is called twice.
    return path.split("@")[0].removeprefix("L['self']").lstrip(".")
