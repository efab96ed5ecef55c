"""Changes that a forward makes to the Python attributes of the model's modules.

A captured graph holds tensors and buffers. Anything else that the forward changes (a counter, a
list, a tensor that is no buffer) changes only while it is captured, and would silently stay as it
was then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Attributes of every module; "forward" is there because the watching one is set on the instance.
_EVERY_MODULES = {*vars(nn.Module()), "forward"}
# Compared by value; anything else by identity.
_PLAIN = (bool, int, float, complex, str, bytes, torch.device)
_CONTAINERS = (list, tuple, set, dict)
_State = dict[tuple[str, str], Any]


@contextlib.contextmanager
def watched_state(model: nn.Module) -> Iterator[dict[str, str]]:
    """While ``model`` is exported: name of each attribute that its forward changes, and how.

    Filled by the time that the context ends; tensors that the forward added are removed then. Other
    attributes that it adds are set up at a first call, and are left alone.
    """
    changes: dict[str, str] = {}
    forward = model.forward
    before = _state(model)

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        start = _state(model)
        result = forward(*args, **kwargs)
        changes.update(_changes(start, _state(model)))
        return result

    try:
        with replaced_forward(model, watched):
            yield changes
    finally:
        modules = dict(model.named_modules())
        for (path, name), value in _state(model).items():
            # A fake tensor of the export, which the model would meet at its next call.
            if (path, name) not in before and isinstance(value, Tensor):
                del modules[path].__dict__[name]


@contextlib.contextmanager
def replaced_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``model`` call ``forward`` in place of its own."""
    # On the instance and not as a hook: the root's hooks are set aside during the export.
    on_instance = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        vars(model).pop("forward")
        if on_instance is not None:
            vars(model)["forward"] = on_instance


def _state(model: nn.Module) -> _State:
    # Containers are copied, one level deep: they may be changed in place.
    return {
        (path, name): type(value)(value) if type(value) in _CONTAINERS else value
        for path, module in model.named_modules()
        if not isinstance(module, nn.RNNBase)  # its lists of parameters are made anew
        for name, value in vars(module).items()
        if name not in _EVERY_MODULES
    }


def _changes(before: _State, after: _State) -> dict[str, str]:
    texts = {}
    for (path, name), value in after.items():
        old = before.get((path, name))
        # A new attribute is set up at a first call, but for tensors, which are results.
        is_state = (path, name) in before or isinstance(value, Tensor)
        if is_state and not _same(old, value):
            texts[f"{path}.{name}" if path else name] = f"{_text(old)} -> {_text(value)}"
    return texts


def _same(first: Any, second: Any) -> bool:
    """Tell whether two states are equal, without an operation on tensors: they are being traced."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, _PLAIN):
        return bool(first == second)
    if type(first) not in _CONTAINERS or len(first) != len(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_alike(first[k], second[k]) for k in first)
    return all(map(_alike, first, second))


def _alike(first: Any, second: Any) -> bool:
    plain = isinstance(first, _PLAIN) and type(first) is type(second)
    return first is second or (plain and bool(first == second))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if type(value) in _CONTAINERS:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, _PLAIN) else type(value).__name__
