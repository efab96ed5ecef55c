"""The memory behind a tensor: as plain data, the unit of liveness and of the memory solvers; and
which views share elements of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
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
        if any(share_elements(*pair) for pair in combinations(group, 2))
    }


def share_elements(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have an element in common.

    Of unequal strides a tensor counts up to its last element. Parts of one storage, such as
    gradients of fused linears, have none.
    """
    if first.layout != torch.strided or second.layout != torch.strided:  # has no storage
        return False
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        return False
    (start, stop), (other_start, other_stop) = map(extent, (first, second))
    if start >= other_stop or other_start >= stop:
        return False
    return first.stride() != second.stride() or _is_reached(
        other_start - start,
        sorted(
            (
                (step, int(up) - 1, int(down) - 1)
                for step, up, down in zip(first.stride(), first.shape, second.shape, strict=True)
                if step
            ),
            reverse=True,
        ),
    )


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the positions in the storage of the first element and after the last one."""
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start, start
    last = sum(
        (int(size) - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + last + 1


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
