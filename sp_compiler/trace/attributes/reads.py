"""Attributes of the model's modules that its compilation reads or writes.

A program depends only on these: a change of another attribute (``model.global_step = 7``) is no
reason to compile again. Every access goes through ``__getattribute__``: ``self.x``, ``getattr`` and
``hasattr`` of missing attributes, properties and methods. Where code looks at a module's entire
``__dict__``, all attributes of that module count.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

# Code in these packages looks in a module's __dict__ for other things than the user's attributes.
_LOOKING_ELSEWHERE = ("torch", "sp_compiler")
# Methods that a copy looks up. It copies all attributes, and does not read them one by one.
_COPYING = ("__getstate__", "__reduce__", "__reduce_ex__")


@dataclass
class AttributeReads:
    """Attributes that were read or written.

    Attributes:
        names: names of the attributes, by ``id`` of the module.
        whole: ``id`` of the modules of which any attribute may have been read.
    """

    names: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    whole: set[int] = field(default_factory=set)

    def of(self, module: nn.Module) -> frozenset[str] | None:
        """Return the names of the attributes of ``module``; ``None`` if it may be any."""
        if id(module) in self.whole:
            return None
        return frozenset(self.names.get(id(module), ()))


@contextlib.contextmanager
def recorded_attributes(model: nn.Module) -> Iterator[AttributeReads]:
    """Context that records all reads and writes inside it; ``model`` must outlive the result."""
    reads = AttributeReads()
    names = reads.names
    get, put, delete = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__

    def __getattribute__(module: nn.Module, name: str) -> Any:
        names[id(module)].add(name)
        if name in _COPYING or (name == "__dict__" and _looks_at_attributes(sys._getframe(1))):
            reads.whole.add(id(module))
        return get(module, name)

    # Writes too: one that changes nothing now may change another value.
    def __setattr__(module: nn.Module, name: str, value: Any) -> None:
        names[id(module)].add(name)
        put(module, name, value)

    def __delattr__(module: nn.Module, name: str) -> None:
        names[id(module)].add(name)
        delete(module, name)

    with contextlib.ExitStack() as stack:
        for function in (__getattribute__, __setattr__, __delattr__):
            stack.enter_context(_method(function))
        # A class that overrides __getattribute__ may never call ours.
        reads.whole.update(
            id(module)
            for module in model.modules()
            if type(module).__getattribute__ is not __getattribute__
        )
        yield reads


@contextlib.contextmanager
def _method(function: Any) -> Iterator[None]:
    """Context in which ``nn.Module`` has ``function`` as its method of that name."""
    # torch internals: nn.Module.__getattribute__, __setattr__ and __delattr__. Set on nn.Module and
    # not on the classes of the model, which call super().
    name = function.__name__
    own = vars(nn.Module).get(name)
    setattr(nn.Module, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(nn.Module, name)
        else:
            setattr(nn.Module, name, own)


def _looks_at_attributes(frame: FrameType) -> bool:
    """Return whether the code that reads a module's ``__dict__`` may depend on its attributes."""
    # Called by dir(), which inspect.getmembers() calls.
    if frame.f_code.co_name == "__dir__":
        return True
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] not in _LOOKING_ELSEWHERE
