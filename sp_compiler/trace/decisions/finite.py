"""Questions of a forward whether all numbers of a tensor are finite.

``if not torch.isfinite(x).all(): x = x.clamp(...)`` reads a number that no capture can know. The
program is the one for finite numbers, and any other becomes NaN in ``x``, for the loss to show::

    x;  x.isfinite().all()  ->  True        =>        x' = masked_fill(x, ~isfinite(x), nan)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_TESTS: Mapping[object, bool] = {
    torch.isfinite: True,
    Tensor.isfinite: True,
    torch.isnan: False,
    Tensor.isnan: False,
    torch.isinf: False,
    Tensor.isinf: False,
}
"""What is computed of numbers one by one, and its elements if all of the numbers are finite."""
_EVERY: Mapping[object, bool] = {
    torch.all: True,
    Tensor.all: True,
    torch.any: False,
    Tensor.any: False,
}
"""Reductions, and the elements that all of an operand's must be for the result to be known."""
_COMBINED: Mapping[object, Callable[..., bool]] = {
    Tensor.__or__: lambda *known: any(known),
    torch.logical_or: lambda *known: any(known),
    Tensor.logical_or: lambda *known: any(known),
    Tensor.__and__: lambda *known: all(known),
    torch.logical_and: lambda *known: all(known),
    Tensor.logical_and: lambda *known: all(known),
    Tensor.__invert__: lambda known: not known,
    torch.logical_not: lambda known: not known,
    Tensor.logical_not: lambda known: not known,
}


@dataclass(frozen=True)
class _Answer:
    """Elements of a tensor if all numbers of others are finite.

    Attributes:
        tensor: whose elements they are; held, so that no other tensor gets its id.
        value: of each of them.
        asked: the others, with their versions when they were read.
    """

    tensor: Tensor
    value: bool
    asked: tuple[tuple[Tensor, int], ...]


@dataclass
class FiniteTests:
    """Tests for finite numbers that a forward has made during a capture."""

    _answers: dict[int, _Answer] = field(default_factory=dict)

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note ``result`` of ``func(*args)`` if it is known for finite numbers."""
        if func in _TESTS and args[0].is_floating_point():
            numbers = (args[0], args[0]._version)
            self._answers[id(result)] = _Answer(result, _TESTS[func], (numbers,))
            return
        if func not in _EVERY and func not in _COMBINED:
            return
        operands = [self._answers.get(id(each)) for each in args if isinstance(each, Tensor)]
        known = [each for each in operands if each is not None]
        if not known or len(known) < len(operands) or not isinstance(result, Tensor):
            return
        values = [each.value for each in known]
        if func in _EVERY and values != [_EVERY[func]]:
            return
        value = values[0] if func in _EVERY else _COMBINED[func](*values)
        asked = tuple(pair for each in known for pair in each.asked)
        self._answers[id(result)] = _Answer(result, value, asked)

    def answer(self, tensor: Tensor) -> bool | None:
        """Return the number of ``tensor`` for finite numbers, and make all others NaN.

        Returns:
            ``None`` if ``tensor`` is no such test, or if its operands cannot be written into.
        """
        found = self._answers.get(id(tensor))
        if found is None or not all(map(_can_be_written, found.asked)):
            return None
        for index, (each, _) in enumerate(found.asked):
            if not any(each is earlier for earlier, _ in found.asked[:index]):
                try:
                    each.masked_fill_(~each.isfinite(), math.nan)
                except RuntimeError:  # torch allows no write into one of the parts of a split
                    return None
        return found.value


def _can_be_written(asked: tuple[Tensor, int]) -> bool:
    """Return whether the tensor still has the numbers asked for, and its gradient stays its own."""
    tensor, version = asked
    # A write without gradients would be one that stops them in the functional graph.
    gradients = torch.is_grad_enabled() or not tensor.requires_grad
    view_of_leaf = tensor._is_view() and tensor._base is not None and tensor._base.is_leaf
    leaf = tensor.requires_grad and (tensor.is_leaf or view_of_leaf)
    return tensor._version == version and gradients and not leaf
