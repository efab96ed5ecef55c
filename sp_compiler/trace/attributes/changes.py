"""Changes that a forward makes to the Python attributes of the model's modules.

A captured graph can write only buffers. Anything else that the forward changes (a counter, a list,
a tensor that is not a buffer) changes only during the capture. A change that depends only on the
inputs is returned by the program and stored in the attribute after each call, see
:mod:`sp_compiler.base.stored_attributes`. To find out, the forward is exported again with other
values in those attributes, and must give the same graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.stored_attributes import How, Result, Stored

# Attributes of every module; "forward" because the one that watches is set on the instance.
_EVERY_MODULES = {*vars(nn.Module()), "forward"}
# Compared by value; anything else by identity.
_PLAIN = (bool, int, float, complex, str, bytes, torch.device)
_CONTAINERS = (list, tuple, set, dict, OrderedDict, defaultdict)
# The difference of numbers in the second export: far from any that a model would compare with.
_SHIFT = 1_000_003
_MARK = "sp_compiler"
_ABSENT = object()

Key = tuple[str, str]
"""Path of a module and name of an attribute."""


@dataclass
class Held:
    """The value of an attribute, and the contents of a container, which may change in place."""

    value: Any
    content: Any

    @classmethod
    def of(cls, value: Any) -> Held:
        # One level deep.
        return cls(value, copy.copy(value) if type(value) in _CONTAINERS else value)

    def restore(self) -> Any:
        """Return the value as it was."""
        if type(self.value) not in _CONTAINERS:
            return self.value  # not a plain container: there is no copy of its contents
        if isinstance(self.value, list):
            self.value[:] = self.content
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self.content)
        return self.value


_State = dict[Key, Held]


@dataclass
class Changed:
    """Change of one attribute by one forward; ``before`` is ``None`` if it did not exist."""

    before: Held | None
    after: Held

    def __str__(self) -> str:
        before = None if self.before is None else self.before.content
        return f"{_text(before)} -> {_text(self.after.content)}"

    @property
    def is_plain(self) -> bool:
        """Return whether the value is a number, text or ``None`` before and after."""
        values = (None if self.before is None else self.before.value, self.after.value)
        return all(value is None or isinstance(value, _PLAIN) for value in values)

    def part(self) -> tuple[How, Any]:
        """Return how the attribute was changed, and the part that is new."""
        before, after = self.before, self.after.content
        if before is None or before.value is not self.after.value:
            return "set", after
        if isinstance(after, list):
            num = len(before.content)
            is_longer = len(after) > num and all(map(alike, before.content, after))
            return ("append", after[num:]) if is_longer else ("refill", after)
        if isinstance(after, dict):
            if before.content.keys() - after.keys():
                return "refill", after
            known = before.content
            return "update", {k: v for k, v in after.items() if not alike(known.get(k), v)}
        return "set", after


@dataclass
class Changes:
    """Attributes that a forward changed.

    Attributes:
        changed: changes by path and name.
        results: tensors in them, which the forward returns in addition to its outputs.
    """

    changed: dict[Key, Changed] = field(default_factory=dict)
    results: list[Tensor] = field(default_factory=list)

    def record(self, before: _State, after: _State) -> None:
        """Record the differences between the states before and after a forward."""
        self.changed.clear()
        self.results.clear()
        filled: set[int] = set()
        for key, held in after.items():
            old = before.get(key)
            # Other new objects are set up once by the forward, and stay.
            is_new = old is None and (_is_traced(held.value) or isinstance(held.value, _PLAIN))
            is_other = old is not None and not _same(old.content, held.content)
            # A list that several modules share is filled once.
            if id(held.value) in filled or not (is_new or is_other):
                continue
            change = self.changed[key] = Changed(old, held)
            how, part = change.part()
            if how != "set":
                filled.add(id(held.value))
            if _can_return(leaves := pytree.tree_leaves(part)):
                self.results += [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def stored(self, key: Key, how: How, value: Any) -> Stored | None:
        """Return ``value`` in a form that a program can return; ``None`` if that is impossible."""
        leaves, spec = pytree.tree_flatten(value)
        if not _can_return(leaves):
            return None
        place = {id(result): Result(index) for index, result in enumerate(self.results)}
        return Stored(*key, how, tuple(place.get(id(leaf), leaf) for leaf in leaves), spec)


@dataclass
class Settled:
    """Changes that are stored after every call, and the text of all others by name."""

    stored: list[Stored]
    lost: dict[str, str]


def settle(changes: Changes, repeat: Callable[[Mapping[Key, Any]], Changes | None]) -> Settled:
    """Decide which ``changes`` a program can repeat in every call.

    Args:
        changes: changes in the export whose graph is used.
        repeat: exports again with the given initial values of attributes; returns the changes, or
            ``None`` if the export fails or gives another graph.
    """
    kept: dict[Key, Stored | None] = {}
    tried: dict[Key, Any] = {}
    for key, change in changes.changed.items():
        how, part = change.part()
        if change.before is None and not _is_traced(part):
            # The forward adds a number to the module, so nothing can have read it before.
            kept[key] = changes.stored(key, how, part)
        elif _can_return(pytree.tree_leaves(part)):
            tried[key] = _another(change)
    groups = [tried] if tried else []
    while groups:
        group = groups.pop()
        second = repeat(group)
        names = sorted({name for _, name in group})
        if second is None and len(names) > 1:
            # Layers use an attribute of one name in the same way: one export per name is enough.
            groups += [{key: group[key] for key in group if key[1] == name} for name in names]
            continue
        for key, start in group.items():
            change = changes.changed[key]
            if second is not None:
                kept[key] = _described(key, changes, start, second.changed.get(key))
            elif change.is_plain:
                kept[key] = changes.stored(key, "decide", change.after.value)
    # In the order of the modules, which is the same on all ranks.
    stored = [each for key in changes.changed if (each := kept.get(key)) is not None]
    known = {(each.path, each.name) for each in stored}
    lost = {
        ".".join(filter(None, key)): str(change)
        for key, change in changes.changed.items()
        if key not in known
    }
    return Settled(stored, lost)


def _described(key: Key, changes: Changes, start: Any, second: Changed | None) -> Stored | None:
    """Return a description of the change that holds for any initial value, in particular for
    ``start`` in the ``second`` export; ``None`` if there is none."""
    first = changes.changed[key]
    how, part = first.part()
    if first.is_plain:
        before = None if first.before is None else first.before.value
        after = start if second is None else second.after.value
        if type(part) is type(after) and part == after:
            return changes.stored(key, "set", part)
        if not all(type(value) in (int, float) for value in (before, part, start, after)):
            return None
        step = part - before
        # Sums of floats round differently at another magnitude.
        is_count = math.isclose(after - start, step, rel_tol=1e-6)
        return changes.stored(key, "add", step) if is_count else None
    if second is None:
        return None
    how_too, part_too = second.part()
    leaves, spec = pytree.tree_flatten(part)
    leaves_too, spec_too = pytree.tree_flatten(part_too)
    if spec != spec_too or not all(map(_alike_or_tensors, leaves, leaves_too)):
        return None
    # An empty container does not show whether the forward clears it; the second start does.
    was_empty = first.before is not None and not first.before.content
    return changes.stored(key, how_too, part) if how == how_too or was_empty else None


@contextlib.contextmanager
def watched_state(model: nn.Module) -> Iterator[Changes]:
    """Context for exporting ``model``, whose forward also returns the tensors that it stored.

    Each forward restores the attributes, except for new ones without tensors: these are set up by
    the first call and stay.
    """
    changes = Changes()
    forward = model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        before = _state(model)
        result = forward(*args, **kwargs)
        after = _state(model)
        # Export may call the forward more than once; the last call is the one that it keeps.
        changes.record({**_defaults(model, after), **before}, after)
        _restore(model, before)
        return result, list(changes.results)

    outside = _state(model)
    try:
        with replaced_forward(model, watched):
            yield changes
    finally:
        # Export leaves copies of lists, so that two modules would no longer share one.
        _restore(model, outside)


@contextlib.contextmanager
def changed_attributes(model: nn.Module, values: Mapping[Key, Any]) -> Iterator[None]:
    """Context in which attributes of ``model`` have other values; shared lists stay shared."""
    modules = dict(model.named_modules())
    old = {(path, name): vars(modules[path]).get(name, _ABSENT) for path, name in values}
    shared = {
        id(old[key]): value for key, value in values.items() if type(old[key]) in (list, dict)
    }
    saved = [
        (module.__dict__, name, value, shared[id(value)])
        for module in modules.values()
        for name, value in vars(module).items()
        if id(value) in shared
    ]
    saved += [
        (modules[path].__dict__, name, old[path, name], value)
        for (path, name), value in values.items()
        if id(old[path, name]) not in shared
    ]
    for attributes, name, _, value in saved:
        attributes[name] = value
    try:
        yield
    finally:
        for attributes, name, value, _ in saved:
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value


@contextlib.contextmanager
def replaced_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``model`` calls ``forward`` instead of its own."""
    # On the instance and not as a hook: the root's hooks are removed during the export.
    on_instance = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        vars(model).pop("forward")
        if on_instance is not None:
            vars(model)["forward"] = on_instance


def _state(model: nn.Module) -> _State:
    return {
        (path, name): Held.of(value)
        for path, module in model.named_modules()
        if not isinstance(module, nn.RNNBase)  # it recreates its lists of parameters
        for name, value in vars(module).items()
        if name not in _EVERY_MODULES
    }


def _defaults(model: nn.Module, state: _State) -> _State:
    """Return the values of attributes in ``state`` before they are set: those of the class."""
    classes = {path: type(module) for path, module in model.named_modules()}
    found = {
        key: inspect.getattr_static(classes[key[0]], key[1], _ABSENT)
        for key in state
        if key[0] in classes
    }
    kinds = (*_PLAIN, *_CONTAINERS, type(None))
    return {key: Held.of(value) for key, value in found.items() if isinstance(value, kinds)}


def _restore(model: nn.Module, before: _State) -> None:
    modules = dict(model.named_modules())
    for (path, name), held in before.items():
        if path in modules:  # a forward may replace a module
            modules[path].__dict__[name] = held.restore()
    after = _state(model)
    defaults = _defaults(model, after)
    for (path, name), held in after.items():
        if (path, name) not in before and (_is_traced(held.value) or (path, name) in defaults):
            # Otherwise the model would find it in its next call.
            del modules[path].__dict__[name]


def _another(change: Changed) -> Any:
    """Return a value for an attribute that differs from the one before the first forward."""
    before = None if change.before is None else change.before.content
    if before is None:
        before = change.after.value if change.is_plain else None
        return torch.zeros((), device="cpu") if before is None else _another_plain(before)
    if isinstance(before, list):
        return [*before, before[-1] if before else torch.zeros((), device="cpu")]
    if isinstance(before, dict):
        other, after = copy.copy(before), change.after.content
        for key in before if isinstance(after, dict) else ():
            # The forward may have read the number that it replaces.
            if isinstance(before[key], _PLAIN) and not alike(before[key], after.get(key)):
                other[key] = _another_plain(before[key])
        other[_MARK] = torch.zeros((), device="cpu")
        return other
    return _another_plain(before) if isinstance(before, _PLAIN) else None


def _another_plain(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return value + _SHIFT
    if isinstance(value, bytes):
        return value + _MARK.encode()
    return value + _MARK if isinstance(value, str) else None


def _is_traced(value: Any) -> bool:
    """Return whether a value contains traced tensors."""
    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value))


def _can_return(leaves: list[Any]) -> bool:
    return all(leaf is None or isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)


def _same(first: Any, second: Any) -> bool:
    """Return whether two states are equal, without operations on tensors, which are being
    traced."""
    if alike(first, second):
        return True
    if type(first) is not type(second):
        return False
    if type(first) not in _CONTAINERS or len(first) != len(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(alike(first[k], second[k]) for k in first)
    return all(map(alike, first, second))


def alike(first: Any, second: Any) -> bool:
    """Return whether two values are the same object, or equal numbers or texts of one type."""
    plain = isinstance(first, _PLAIN) and type(first) is type(second)
    return first is second or (plain and bool(first == second))


def _alike_or_tensors(first: Any, second: Any) -> bool:
    return alike(first, second) or (isinstance(first, Tensor) and isinstance(second, Tensor))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if type(value) in _CONTAINERS:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, _PLAIN) else type(value).__name__
