"""Attributes that a user set on the modules of a compiled model, as part of the key of a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from torch import nn

from sp_compiler.runtime.keys.call_key import Attribute, Constant


class Presence(Enum):
    """Placeholder for the value of an attribute that does not exist."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return self.value


class SetAttributes:
    """Attributes that were set since the compilation, and which of them programs depend on.

    A program depends on the attributes that its compilation read; see
    :mod:`sp_compiler.trace.attributes.reads`. Attributes that no compilation has read yet may have
    any value in all programs.
    """

    def __init__(self) -> None:
        self._values: dict[Attribute, Constant] = {}
        self._before: dict[Attribute, Constant | None] = {}
        self._texts_before: dict[Attribute, str] = {}
        self._stored: set[Attribute] = set()
        # Set by code of the model, which may compute other attributes from them.
        self._always: set[Attribute] = set()
        # By path of the module; None for all names.
        self._read: dict[str, frozenset[str] | None] = {}
        self._key: tuple[tuple[Attribute, Constant], ...] | None = ()

    def set(self, path: str, module: nn.Module, name: str, value: Any) -> None:
        """Record that the user is about to set attribute ``name`` of ``module``, at ``path``; to
        :attr:`Presence.ABSENT` when it is deleted."""
        attribute = (path, name)
        if attribute not in self._before:
            before = vars(module).get(name, Presence.ABSENT)
            self._before[attribute] = None if before is Presence.ABSENT else Constant(before)
            default = getattr(type(module), name, before) if before is Presence.ABSENT else before
            self._texts_before[attribute] = Constant(default).short()
        if _sets_others(type(module), name):
            self._always.add(attribute)
        self._values[attribute] = Constant(value)
        self._key = None

    def read(self, names: Mapping[str, frozenset[str] | None]) -> None:
        """Record what a compilation read, by path of the module; ``None`` for any attribute."""
        for path, fresh in names.items():
            known = self._read.get(path, frozenset())
            self._read[path] = None if known is None or fresh is None else known | fresh
        self._key = None

    def store(self, attributes: Iterable[Attribute]) -> None:
        """Record those that a program changes in every call, bypassing :meth:`set`."""
        self._stored.update(attributes)
        self._key = None

    def key(self) -> tuple[tuple[Attribute, Constant], ...]:
        """Return those that programs depend on and that differ from their first values."""
        if self._key is None:
            # Sorted: the order in which they were set does not matter.
            self._key = tuple(sorted(filter(self._counts, self._values.items()), key=_name))
        return self._key

    def _counts(self, item: tuple[Attribute, Constant]) -> bool:
        (path, name), value = item
        names = self._read.get(path, frozenset())
        if (path, name) in self._always:
            return True
        is_read = names is None or name in names
        before = self._before[path, name]
        # An attribute that a program changes may no longer have its first value.
        is_known = before is not None and before.is_plain and (path, name) not in self._stored
        return is_read and not (is_known and before == value)

    def text_before(self, attribute: Attribute) -> str:
        """Return what an attribute was before the user set it."""
        return self._texts_before[attribute]


def _name(item: tuple[Attribute, Constant]) -> Attribute:
    return item[0]


def _sets_others(kind: type[nn.Module], name: str) -> bool:
    """Return whether setting an attribute runs code of the model, such as a property's."""
    own = kind.__setattr__ is not nn.Module.__setattr__
    return own or hasattr(inspect.getattr_static(kind, name, None), "__set__")
