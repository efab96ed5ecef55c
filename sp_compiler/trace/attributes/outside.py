"""Numbers outside of a model that its forward changes: attributes of its classes, and globals.

``Layer.calls += 1`` and ``global STEP`` run during the capture, like all Python code. Results that
a forward computes from them are constants of the graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from sp_compiler.base.warn import is_library
from sp_compiler.trace.attributes.changes import alike

_ABSENT = object()
_Place = tuple[Any, str]
"""A class or module, and the name of an attribute."""


@contextlib.contextmanager
def numbers_outside_watched(model: nn.Module) -> Iterator[dict[str, str]]:
    """Context for exporting ``model``; at its end, the yielded dict has the text of each change.

    The changes are not undone: other code may count with the same numbers, and it is unknown what
    else would have to be restored with them.
    """
    changes: dict[str, str] = {}
    before = _numbers(model)
    try:
        yield changes
    finally:
        for (owner, name), new in _numbers(model).items():
            old = before.get((owner, name), _ABSENT)
            if alike(old, new):
                continue
            is_class = isinstance(owner, type)
            where = owner.__qualname__ if is_class else f"global {owner.__name__}"
            changes[f"{where}.{name}"] = f"{'none' if old is _ABSENT else old} -> {new}"


def _numbers(model: nn.Module) -> dict[_Place, Any]:
    # Dicts instead of sets, so that the order is the same on all ranks.
    classes = dict.fromkeys(each for module in model.modules() for each in type(module).__mro__)
    own = [each for each in classes if not is_library(_file_of(each.__module__))]
    files = dict.fromkeys(each.__module__ for each in own)
    # A module whose file was executed without an import may be missing in sys.modules.
    modules = [sys.modules[name] for name in files if name in sys.modules]
    return {
        (owner, name): value
        for owner in (*own, *modules)
        for name, value in list(vars(owner).items())
        if type(value) in (bool, int, float) and not name.startswith("__")
    }


def _file_of(module: str) -> str:
    # The module of a notebook has no file; its code is the user's.
    return getattr(sys.modules.get(module), "__file__", None) or ""
