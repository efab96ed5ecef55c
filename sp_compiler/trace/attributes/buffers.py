"""Buffers that a forward sets: ``self.total = self.total + x``.

A captured graph can write into a buffer, but not exchange it: while a model is captured, its
forward ends with writes of what it has set into the tensors that were there before. Export itself
does so for buffers of the root alone, and takes one for another where a buffer there is ``None``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from sp_compiler.trace.attributes.changes import Key, replaced_forward

_Buffers = dict[Key, Tensor | None]


@contextlib.contextmanager
def set_buffers_written(model: nn.Module) -> Iterator[dict[str, str]]:
    """While ``model`` is exported: its forward writes into the buffers that it sets.

    Yields the text of each change, by name, that no write can express; that buffer stays as it is.
    """
    lost: dict[str, str] = {}
    forward = model.forward
    # torch internals: export's own hook on assignments. Up to PyTorch 2.12 it also stays, on all
    # modules of the process, where an export fails: torch.compile breaks graphs at each of them.
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    users = dict(hooks)

    @functools.wraps(forward)
    def writing(*args: Any, **kwargs: Any) -> Any:
        before = _buffers_of(model)
        with _exchanged(hooks, users):
            result = forward(*args, **kwargs)
        after = _buffers_of(model)
        _restore(model, before)
        lost.clear()
        return _written(before, after, result, lost)

    try:
        with replaced_forward(model, writing):
            yield lost
    finally:
        hooks.clear()
        hooks.update(users)


@contextlib.contextmanager
def _exchanged(hooks: dict[Any, Any], others: Mapping[Any, Any]) -> Iterator[None]:
    saved = dict(hooks)
    hooks.clear()
    hooks.update(others)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(saved)


def _buffers_of(model: nn.Module) -> _Buffers:
    return {
        (path, name): value
        for path, module in model.named_modules()
        # torch internals: the dict of buffers. named_buffers() leaves out those that are None.
        for name, value in module._buffers.items()
    }


def _restore(model: nn.Module, before: _Buffers) -> None:
    for path, module in model.named_modules():
        own = {name: value for (where, name), value in before.items() if where == path}
        module._buffers.clear()
        module._buffers.update(own)


def _written(before: _Buffers, after: _Buffers, result: Any, lost: dict[str, str]) -> Any:
    """Write what was set; return ``result`` with the values from before that."""
    names: dict[int, list[Key]] = {}
    for key, old in before.items():
        if old is not None:
            names.setdefault(id(old), []).append(key)
    writes: list[tuple[Tensor, Tensor]] = []
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old is new:
            continue
        is_one = all(after.get(each) is new for each in names.get(id(old), ()))
        if old is None or new is None or _described(old) != _described(new) or not is_one:
            text = f"{_described(old)} -> {_described(new)}" if is_one else "no longer shared"
            lost[".".join(filter(None, key))] = text
        else:
            writes.append((old, new))
    # What the forward returns or sets may be another buffer, or part of one.
    storages = {_storage(old) for old, _ in writes}

    def apart(value: Tensor) -> Tensor:
        return value.clone() if _storage(value) in storages else value

    if not writes:
        return result
    result = pytree.tree_map_only(Tensor, apart, result)
    with torch.no_grad():
        for old, new in [(old, apart(new)) for old, new in writes]:
            old.copy_(new)
    return result


def _described(value: Tensor | None) -> str:
    if value is None:
        return "None"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)} on {value.device}"


def _storage(value: Tensor) -> StorageWeakRef | None:
    # Of sparse tensors and their like there is none.
    return StorageWeakRef(value.untyped_storage()) if value.layout is torch.strided else None
