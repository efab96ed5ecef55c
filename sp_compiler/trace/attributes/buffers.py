"""Buffers that a forward sets: ``self.total = self.total + x``.

A captured graph can write into a buffer, but not replace it. Therefore, while a model is captured,
its forward ends with writes of the new values into the tensors that were there before. Export does
so only for buffers of the root module, and confuses them if one is ``None``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from sp_compiler.ir.text import dtype_name
from sp_compiler.trace.attributes.changes import Key, replaced_forward

_Buffers = dict[Key, Tensor | None]


@dataclass
class SetBuffers:
    """Buffers that a forward sets.

    Attributes:
        written: those that the captured graph writes.
        lost: by name, the text of each change that a write cannot express; that buffer stays as it
            is.
        lost_sizes: by path of a module, the sizes of its new values in ``lost`` that differ from
            those before.
    """

    written: set[Key] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    lost_sizes: dict[str, set[int]] = field(default_factory=dict)


@contextlib.contextmanager
def set_buffers_written(model: nn.Module, unchanged: Collection[str]) -> Iterator[SetBuffers]:
    """Context for exporting ``model``, whose forward writes into the buffers that it sets.

    Args:
        model: the model.
        unchanged: paths of modules whose buffers stay as they are.
    """
    found = SetBuffers()
    forward = model.forward
    # torch internals: export's own hook on assignments. Up to PyTorch 2.12 it stays on all modules
    # of the process if an export fails, and then torch.compile breaks graphs at each assignment.
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    users = dict(hooks)

    @functools.wraps(forward)
    def writing(*args: Any, **kwargs: Any) -> Any:
        before = _buffers_of(model)
        with mock.patch.dict(hooks, users, clear=True):
            result = forward(*args, **kwargs)
        after = _buffers_of(model)
        _restore(model, before)
        found.lost.clear()
        found.lost_sizes.clear()
        found.written.clear()
        return _written(before, after, result, found, unchanged)

    with mock.patch.dict(hooks), replaced_forward(model, writing):
        yield found


def _buffers_of(model: nn.Module) -> _Buffers:
    return {
        (path, name): value
        for path, module in model.named_modules()
        # torch internals: the dict of buffers. named_buffers() leaves out those that are None.
        for name, value in module._buffers.items()
    }


def _restore(model: nn.Module, before: _Buffers) -> None:
    own: dict[str, dict[str, Tensor | None]] = {}
    for (path, name), value in before.items():
        own.setdefault(path, {})[name] = value
    for path, module in model.named_modules():
        module._buffers.clear()
        module._buffers.update(own.get(path, {}))


def _written(
    before: _Buffers, after: _Buffers, result: Any, found: SetBuffers, unchanged: Collection[str]
) -> Any:
    """Write the new values into the buffers; return ``result`` as it was before these writes."""
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
        stays = old is None or new is None or key[0] in unchanged
        if stays or _described(old) != _described(new) or not is_one:
            text = f"{_described(old)} -> {_described(new)}" if is_one else "no longer shared"
            found.lost[".".join(filter(None, key))] = text
            found.lost_sizes.setdefault(key[0], set()).update(_changed_sizes(old, new))
        else:
            assert old is not None
            assert new is not None
            writes.append((old, new))
            found.written.add(key)
    # A returned or new value may be another buffer, or part of one.
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


def _changed_sizes(old: Tensor | None, new: Tensor | None) -> Iterator[int]:
    after = () if new is None else new.shape
    before = old.shape if old is not None and old.dim() == len(after) else [None] * len(after)
    for first, second in zip(before, after, strict=True):
        if type(second) is int and first != second:
            yield second


def _described(value: Tensor | None) -> str:
    if value is None:
        return "None"
    return f"{dtype_name(value.dtype)} {list(value.shape)} on {value.device}"


def _storage(value: Tensor) -> StorageWeakRef | None:
    # Tensors of other layouts, such as sparse ones, have no storage.
    return StorageWeakRef(value.untyped_storage()) if value.layout is torch.strided else None
