"""The memory behind a tensor: as plain data, the unit of liveness and of the memory solvers; and
which views share elements of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """Memory allocated by a call: ``owner`` is ("forward" or "backward", call index, name)."""

    owner: tuple[str, int, str]
    num_bytes: int


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def bases_with_overlap(values: Iterable[Any]) -> set[int]:
    """Return ids of the tensors of which two of ``values`` have an element in common."""
    views: dict[int, list[Tensor]] = defaultdict(list)
    for value in values:
        if isinstance(value, Tensor):
            views[id(base_of(value))].append(value)
    return {
        base
        for base, group in views.items()
        if any(_may_overlap(*pair) for pair in combinations(group, 2))
    }


def _may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one tensor may have an element in common; exact for equal strides."""
    gap = int(b.storage_offset() - a.storage_offset())
    if a.stride() != b.stride():
        return -_extent(b) < gap < _extent(a)
    steps = [
        (stride, up - 1, down - 1)
        for stride, up, down in zip(a.stride(), a.shape, b.shape, strict=True)
        if stride
    ]
    return _is_reached(gap, sorted(steps, reverse=True)) and a.numel() > 0 < b.numel()


def _extent(tensor: Tensor) -> int:
    """Elements of memory from the first element of ``tensor`` to behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


def _is_reached(gap: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether ``gap`` is a sum of multiples of strides, each from minus ``down`` to ``up`` times.

    ``steps``: (stride, up, down), the largest stride first.
    """
    if not steps:
        return gap == 0
    (step, up, down), *rest = steps
    reach = sum(stride * max(counts) for stride, *counts in rest)
    first, last = max(-down, -((reach - gap) // step)), min(up, (gap + reach) // step)
    return any(_is_reached(gap - n * step, rest) for n in range(first, last + 1))
