"""Rows that a forward selects by values of its inputs and buffers: their count is a decision.

A graph has no size for ``x[mask]`` or ``x[:length]``. If the mask is known before each call, so is
the count, and so is a size that is a tensor (``x.view(height, -1)``)::

    x[mask]  ->  x.flatten(0, mask.ndim - 1)[argsort(mask, descending, stable)[:count]]

The program then holds only for calls that select the same number of rows. Captures therefore count
rows only where :mod:`sp_compiler.trace.masked_rows` cannot compute all of them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_MASKED_SELECT = (torch.masked_select, Tensor.masked_select)
_NONZERO = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_PUT = (torch.index_put, Tensor.index_put, Tensor.index_put_)
_REPEATED = (torch.repeat_interleave, Tensor.repeat_interleave)
_ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
_FACTORIES = (torch.arange, torch.empty, torch.ones, torch.zeros)
_SIZED = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "expand", "narrow", "new_empty", "new_ones", "new_zeros", "repeat", "reshape", "split",
        "split_with_sizes", "tile", "unflatten", "unfold", "view",
    )
    if hasattr(owner, name)
)  # fmt: skip
"""Functions of a tensor and sizes, which may be tensors."""


@dataclass
class ChosenRows:
    """How a capture treats rows that are selected by values known before each call.

    Attributes:
        counted: whether their counts are read.
        seen: whether there were any.
    """

    counted: bool = False
    seen: bool = False


@dataclass
class RowChoices:
    """Calls that select rows, in one run of a forward.

    Attributes:
        rows: how they are treated; ``seen`` is set here.
        known: returns whether the values of a tensor are known before each call.
        read: reads the number in such a tensor, as a decision.
    """

    rows: ChosenRows
    known: Callable[[Tensor], bool]
    read: Callable[[Tensor], Any]

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``func``; ``NotImplemented`` if it is to be called unchanged."""
        if not args:
            return NotImplemented
        if func in _ITEMS:
            return self._item(func, *args)
        if func in _FACTORIES or func in _SIZED:
            return self._sized(func, args, kwargs)
        if func in _PUT and not kwargs:
            return self._put(func, *args)
        if func in _REPEATED and "output_size" not in kwargs:
            return self._repeated(func, args, kwargs)
        return self._selected(func, args, kwargs)

    def _selected(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in _MASKED_SELECT and not kwargs and self._is_known(args[1]):
            x, mask = args
            shape = torch.broadcast_shapes(x.shape, mask.shape)
            return x.expand(shape).reshape(-1)[self._places(mask.expand(shape))]
        if func in _NONZERO and self._is_known(args[0]):
            columns = self._columns(args[0] != 0)
            return columns if kwargs.get("as_tuple") else torch.stack(columns, 1)
        if func is torch.where and len(args) == 1 and not kwargs and self._is_known(args[0]):
            return self._columns(args[0] != 0)
        return NotImplemented

    def _put(self, func: Any, x: Any, indices: Any, *rest: Any) -> Any:
        taken: list[Any] = []
        for index in indices:
            taken += self._columns(index) if self._is_counted_mask(index) else [index]
        return func(x, tuple(taken), *rest) if self.rows.counted else NotImplemented

    def _is_counted_mask(self, index: Any) -> bool:
        return _is_mask(index) and self._is_known(index)

    def _is_known(self, tensor: Any) -> bool:
        """Return whether rows selected by ``tensor`` are to be counted."""
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            return False
        return self._counts(tensor)

    def _counts(self, tensor: Tensor) -> bool:
        known = self.known(tensor)
        self.rows.seen |= known
        return known and self.rows.counted

    def _places(self, mask: Tensor) -> Tensor:
        """Return the flat indices at which a mask is true."""
        # By sorting all and taking the first: these operators have rules, and static sizes.
        order = mask.reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)
        return order[: int(self.read(mask.sum()))]

    def _columns(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the indices at which a mask is true, by dim."""
        places = self._places(mask)
        columns = []
        for size in reversed(mask.shape):
            columns.append(places % size)
            places = places // size
        return tuple(columns[::-1])

    def _item(self, func: Any, x: Any, index: Any, *value: Any) -> Any:
        reads = func is Tensor.__getitem__
        if reads and self._is_counted_mask(index):
            return x.flatten(0, index.ndim - 1)[self._places(index)]
        taken: list[Any] = []
        for step in index if isinstance(index, tuple) else (index,):
            if isinstance(step, slice):
                taken.append(slice(*map(self._size, (step.start, step.stop, step.step))))
            elif self._is_counted_mask(step):
                taken += self._columns(step)
            else:
                taken.append(step)
        return func(x, tuple(taken), *value) if self.rows.counted else NotImplemented

    def _sized(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        own = 0 if func in _FACTORIES else 1
        sizes, named = pytree.tree_map(self._size, (tuple(args[own:]), dict(kwargs)))
        return func(*args[:own], *sizes, **named) if self.rows.counted else NotImplemented

    def _size(self, size: Any) -> Any:
        """Return a size or a slice's bound, as a number if it is a tensor that is to be read."""
        counts = isinstance(size, Tensor) and not size.ndim and self._counts(size)
        return self.read(size) if counts else size

    def _repeated(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        repeats = kwargs["repeats"] if "repeats" in kwargs else args[1] if args[1:] else args[0]
        # With one number for all rows, its sum is not the output size.
        if not isinstance(repeats, Tensor) or repeats.numel() == 1 or not self._is_known(repeats):
            return NotImplemented
        return func(*args, **kwargs, output_size=int(self.read(repeats.sum())))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim > 0
