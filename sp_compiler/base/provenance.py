"""Origin of a node in the user's model: its layer, its module, its source line."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

_INDEXED = re.compile(r"(^|\.)\d+$")
# Behind the key of a call in ``nn_module_stack``, which nodes that replace others inherit.
_UNLISTED = "@layer"

Stack = Sequence[tuple[str, str, str]]
"""Key, path and class of module calls, each inside the one before; no two calls have one key."""
# A frame of a stack trace: where, and the code there, if it is known. Not those in graphs of
# Dynamo's: by their own name, for what a user types into IPython is in no file either.
_FRAME = re.compile(r'File "(?!<eval_with_key>).*(?:\n(?! *File ").*)?')


@dataclass(frozen=True)
class Layer:
    """One use of a layer: the outermost module in an indexed container (a path ending in ``.N``),
    or, outside of those, one that :func:`unlisted_layers` has found.

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
    for key, path, name in _stack(node):
        if name == "ParametrizationList":  # indexed, but its modules compute a weight
            return OUTSIDE
        if _INDEXED.search(path) or key.endswith(_UNLISTED):
            return Layer(key, path, name)
    return OUTSIDE


def unlisted_layers(stacks: Iterable[Stack]) -> set[str]:
    """Return paths of the modules that are in no list and are layers because they occur several
    times: one that the model loops over, or modules of one class side by side.

    Not those that call no other modules (an activation, a norm), nor those that have layers inside,
    indexed modules that call others.
    """
    calls: dict[tuple[str, str], set[str]] = defaultdict(set)  # by parent and class
    kinds: dict[str, tuple[str, str]] = {}
    calling: set[str] = set()
    around_layers = {""}
    for stack in stacks:
        paths = [path for _, path, _ in stack]
        calling.update(paths[:-1])
        layer = next((depth for depth, path in enumerate(paths) if _INDEXED.search(path)), None)
        if layer is not None and layer < len(paths) - 1:
            around_layers.update(paths[:layer])
        for key, path, name in stack[:layer]:
            kinds[path] = path.rpartition(".")[0], name
            calls[kinds[path]].add(key)
    callers = kinds.keys() & calling - around_layers
    return {path for path in callers if len(calls[kinds[path]]) > 1}


def count_layers(stacks: Sequence[Stack]) -> int:
    """Return how many calls of layers there are."""
    unlisted = unlisted_layers(stacks)
    calls = (
        next((key for key, path, _ in stack if _INDEXED.search(path) or path in unlisted), None)
        for stack in stacks
    )
    return len({key for key in calls if key is not None})


def mark_unlisted_layers(graph: Graph) -> None:
    """Let :func:`layer_of` take the :func:`unlisted_layers` of a captured ``graph`` for layers."""
    stacks = {node: _stack(node) for node in graph.nodes}
    layers = unlisted_layers(stacks.values())
    for node, stack in stacks.items():
        if not layers.isdisjoint(path for _, path, _ in stack):
            entries = node.meta["nn_module_stack"].values()
            node.meta["nn_module_stack"] = {
                f"{key.removesuffix(_UNLISTED)}{_UNLISTED}" if path in layers else key: entry
                for (key, path, _), entry in zip(stack, entries, strict=True)
            }


def _stack(node: Node) -> Stack:
    stack = []
    for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
        # torch.export writes the class as text, Dynamo as the class itself.
        name = module_class if isinstance(module_class, str) else module_class.__name__
        # "@1" marks the second call of a module that is called twice.
        stack.append((str(key), path.split("@")[0], name.rsplit(".", 1)[-1]))
    return stack


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
