"""Origin of a node in the user's model: its layer, its module, its source line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from torch.fx import Node

_INDEXED = re.compile(r"(^|\.)\d+$")
# A frame of a stack trace: where, and the code there, if it is known. Not those in graphs of
# Dynamo's: by their own name, for what a user types into IPython is in no file either.
_FRAME = re.compile(r'File "(?!<eval_with_key>).*(?:\n(?! *File ").*)?')


@dataclass(frozen=True)
class Layer:
    """One use of a layer: the outermost module in an indexed container (a path ending in ``.N``).

    Attributes:
        key: distinguishes repeated calls of one module.
        path: path of the module in the model; "" for everything outside layers.
        class_name: class of the module.
    """

    key: str = ""
    path: str = ""
    class_name: str = ""


OUTSIDE = Layer()


def is_layer(path: str) -> bool:
    """Return whether a module of this path is a layer, neither inside nor outside of layers."""
    *outside, last = path.split(".")
    return last.isdigit() and not any(map(str.isdigit, outside))


def layer_of(node: Node) -> Layer:
    """Return the layer that ``node`` was captured in, or :data:`OUTSIDE`."""
    # Outermost first: a layer may hold indexed modules of its own, such as experts.
    for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
        # "@1" marks the second call of a module that is called twice.
        path = path.split("@")[0]
        # torch.export writes the class as text, Dynamo as the class itself.
        name = module_class if isinstance(module_class, str) else module_class.__name__
        name = name.rsplit(".", 1)[-1]
        if name == "ParametrizationList":  # indexed, but its modules compute a weight
            return OUTSIDE
        if _INDEXED.search(path):
            return Layer(str(key), path, name)
    return OUTSIDE


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
