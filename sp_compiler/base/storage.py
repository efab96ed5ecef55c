"""Storages of tensors: as plain data, the unit of liveness and of the memory solvers; and which
views share elements of a storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """Memory allocated by a call: ``owner`` is ("forward" or "backward", call index, name)."""

    owner: tuple[str, int, str]
    num_bytes: int


class ResultsThatShareMemory(torch.autograd.Function):
    """Returns tensors as views that cannot be changed in place; the error shows this name."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def guarded(results: Sequence[Any], copied: Collection[int] = ()) -> list[Any]:
    """Return a model's results; those that share elements cannot be changed in place.

    Autograd refuses in-place changes of views that one function returns. It does not know that
    other results share memory: the gradient of a change of one would be missing in the others.

    Args:
        results: as the program computes them.
        copied: positions of results that share memory with others although the model copies them.
    """
    results = [
        x.clone() if position in copied and isinstance(x, Tensor) else x
        for position, x in enumerate(results)
    ]
    recorded = {id(x): x for x in results if isinstance(x, Tensor) and x.grad_fn is not None}
    shared = sharing_elements(recorded.values())
    if not shared:
        return results
    views = ResultsThatShareMemory.apply(*shared)
    view_of = {id(result): view for result, view in zip(shared, views, strict=True)}
    return [view_of.get(id(result), result) for result in results]


def sharing_elements(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those of ``tensors`` that share an element with another one, or are given twice."""
    by_storage: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.layout == torch.strided:
            by_storage[tensor.untyped_storage()._cdata].append(tensor)
    return [
        tensor
        for group in by_storage.values()
        for index, tensor in enumerate(group)
        if any(share_elements(tensor, other) for other in group[:index] + group[index + 1 :])
    ]


def share_elements(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors share an element.

    If their strides or element sizes differ, this is an overestimate: each counts with its entire
    range from the first to the last element. Separate parts of one storage, such as gradients of
    fused linears, share none.
    """
    if first.layout != torch.strided or second.layout != torch.strided:  # has no storage
        return False
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        return False
    if not first.numel() or not second.numel():
        return False
    (start, stop), (other_start, other_stop) = map(extent, (first, second))
    # Elements of a view may differ from those of its base, such as parts of complex numbers.
    size, other_size = first.dtype.itemsize, second.dtype.itemsize
    if start * size >= other_stop * other_size or other_start * other_size >= stop * size:
        return False
    if size != other_size or first.stride() != second.stride():
        return True
    steps = zip(first.stride(), first.shape, second.shape, strict=True)
    counts = [(step, int(up) - 1, int(down) - 1) for step, up, down in steps if step]
    return _is_reached(other_start - start, sorted(counts, reverse=True))


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the positions in the storage of the first element and after the last one."""
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start, start
    last = sum(
        (int(size) - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + last + 1


def is_dense(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has no gaps in its storage."""
    start, stop = extent(tensor)
    return stop - start == tensor.numel()


def _is_reached(gap: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether ``gap`` is a sum of strides, each taken from minus ``down`` to ``up`` times.

    ``steps``: (stride, up, down), the largest stride first.
    """
    if not steps:
        return gap == 0
    (step, up, down), *rest = steps
    reach = sum(stride * max(counts) for stride, *counts in rest)
    first, last = max(-down, -((reach - gap) // step)), min(up, (gap + reach) // step)
    return any(_is_reached(gap - n * step, rest) for n in range(first, last + 1))
