"""Which layer of the user's model a node belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Node

_INDEXED = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True)
class Layer:
    """One use of a layer: the outermost module in an indexed container (a path ending in ``.N``).

    Attributes:
        key: tells repeated calls of one module apart.
        path: of the module in the model; "" for everything outside layers.
        class_name: of the module.
    """

    key: str = ""
    path: str = ""
    class_name: str = ""


OUTSIDE = Layer()


def layer_of(node: Node) -> Layer:
    """The layer that ``node`` was captured in, or :data:`OUTSIDE`."""
    for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
        path = path.split("@")[0]
        name = module_class if isinstance(module_class, str) else module_class.__name__
        name = name.rsplit(".", 1)[-1]
        if name == "ParametrizationList":  # a container of what computes a weight
            return OUTSIDE
        if _INDEXED.search(path):
            return Layer(str(key), path, name)
    return OUTSIDE
