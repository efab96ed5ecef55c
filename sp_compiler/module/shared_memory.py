"""Parameters that share memory with other tensors of a model: once sharded, they no longer do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.storage import extent


@dataclass(frozen=True)
class _Named:
    """A parameter or buffer, and the byte range of its elements in its storage."""

    what: str
    value: Tensor
    start: int
    stop: int


def check_memory_apart(model: nn.Module) -> None:
    """Raise an error for a parameter that shares memory with another one, or with a buffer.

    A tied parameter, which several modules have, is one parameter.

    Raises:
        ArgumentError: names both. Each rank would have its parts of them in separate memory, so an
            optimizer step on one would not change the other.
    """
    for one, other in _sharing(model):
        raise ArgumentError(
            f"{one.what} and {other.what} of the model share memory, which they no longer do once "
            "they are sharded: a step of the optimizer would change only one; assign the same "
            "nn.Parameter to both modules, or compute one from the other in forward"
        )


def _sharing(model: nn.Module) -> Iterator[tuple[_Named, _Named]]:
    by_storage: dict[int, list[_Named]] = defaultdict(list)
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, value in tensors:
            # A storage on the meta device has no memory; memory allocated for it later is new.
            if value.numel() and not value.is_meta:
                named = _Named(f"{kind} {name!r}", value, *_byte_range(value))
                by_storage[value.untyped_storage()._cdata].append(named)
    for group in by_storage.values():
        yield from _overlapping(sorted(group, key=lambda named: named.start))


def _overlapping(group: Sequence[_Named]) -> Iterator[tuple[_Named, _Named]]:
    for index, one in enumerate(group):
        for other in group[index + 1 :]:
            if other.start >= one.stop:
                break
            trained = isinstance(one.value, nn.Parameter) or isinstance(other.value, nn.Parameter)
            if trained and _common_elements(one, other):
                yield one, other


def _byte_range(value: Tensor) -> tuple[int, int]:
    start, stop = extent(value)
    return start * value.itemsize, stop * value.itemsize


def _common_elements(one: _Named, other: _Named) -> bool:
    """Return whether overlapping ranges share an element: they may be interleaved columns."""
    if one.value.itemsize != other.value.itemsize:
        return True
    size = (max(one.stop, other.stop) - one.start) // one.value.itemsize
    positions = torch.arange(size, device="cpu")
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")

    def elements(named: _Named) -> Tensor:
        offset = (named.start - one.start) // named.value.itemsize
        return positions.as_strided(named.value.shape, named.value.stride(), offset).flatten()

    taken[elements(one)] = True
    return bool(taken[elements(other)].any())
