"""Questions of a forward whether all numbers of a tensor are finite.

``if not torch.isfinite(x).all(): x = x.clamp(...)`` reads a number that no capture can know. The
program is the one for finite numbers. Where the answer was another, all that the program returns
becomes NaN::

    if torch.isinf(x).any(): ...       =>       asked = x.isinf().any()
    return loss                                 return loss * where(asked != False, nan, 1)

So are the questions of ``torch.distributions`` whether what it is given is valid.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import CaptureError

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
    torch._is_all_true: True,
}
"""Reductions, and the elements that all of an operand's must be for the result to be known."""
_COUNTS = (torch.sum, Tensor.sum)
"""Reductions whose result is known, and zero, if all elements of the operand are."""
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
_COMPARED: Mapping[object, Callable[..., bool]] = {
    Tensor.__eq__: operator.eq,
    torch.eq: operator.eq,
    Tensor.eq: operator.eq,
    torch.ne: operator.ne,
    Tensor.ne: operator.ne,
    torch.gt: operator.gt,
    Tensor.gt: operator.gt,
}
"""Comparisons with a number: how many elements are not finite, and zero."""


@dataclass(frozen=True)
class _Answer:
    """Elements of a tensor if all numbers of others are finite.

    Attributes:
        tensor: whose elements they are; held, so that no other tensor gets its id.
        version: of the tensor: a write may have changed it.
        value: of each of them; a bool, or a count.
    """

    tensor: Tensor
    version: int
    value: int


@dataclass
class FiniteTests:
    """Tests for finite numbers that a forward has made during a capture."""

    _answers: dict[int, _Answer] = field(default_factory=dict)
    _others: list[Tensor] = field(default_factory=list)  # whether an answer was another

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note ``result`` of ``func(*args)`` if it is known for finite numbers, or for valid ones;
        to be called by the mode that has been given ``func``."""
        if not args or not isinstance(result, Tensor):
            return
        value: int | None
        if func in _TESTS:
            value = _TESTS[func] if args[0].is_floating_point() else None
        elif func in _EVERY:
            known = self._known(args[0])
            # Where a distribution gets another answer, it raises. Its frame is the mode's caller.
            asks = sys._getframe(2).f_globals.get("__name__", "")
            is_check = asks.startswith("torch.distributions.")
            value = _EVERY[func] if known is _EVERY[func] or is_check else None
        elif func in _COUNTS:
            known = self._known(args[0])
            value = None if known is None or known else 0
        elif func in _COMBINED:
            operands = [self._known(each) for each in args]
            value = None if None in operands else _COMBINED[func](*operands)
        elif func in _COMPARED and isinstance(args[1], int):
            known = self._known(args[0])
            value = None if known is None else _COMPARED[func](known, args[1])
        else:
            return
        if value is not None:
            self._answers[id(result)] = _Answer(result, result._version, value)

    def _known(self, operand: Any) -> int | None:
        if isinstance(operand, bool):
            return operand
        found = self._answers.get(id(operand))
        return None if found is None or found.version != found.tensor._version else found.value

    def answer(self, tensor: Tensor) -> int | None:
        """Return the number of ``tensor`` for finite numbers; ``None`` if it is no such test."""
        value = self._known(tensor)
        if value is not None:
            self._others.append(tensor.detach() != value)
        return value

    def shown(self, outputs: Any) -> Any:
        """Return ``outputs`` of the forward, NaN where an answer was another.

        Raises:
            CaptureError: none of them is a floating-point tensor.
        """
        if not self._others:
            return outputs
        others = torch.stack([each.reshape(()) for each in self._others])
        leaves, spec = pytree.tree_flatten(outputs)
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in leaves]
        if not any(floats):
            raise CaptureError(
                "the forward asks whether activations are finite, and returns no floating-point "
                "tensor that could show where they are not; ask outside of forward"
            )
        # By a product, so that gradients are NaN as well.
        marked = [
            x * torch.where(others.any(), math.nan, 1.0).to(x.dtype) if is_float else x
            for x, is_float in zip(leaves, floats, strict=True)
        ]
        return pytree.tree_unflatten(marked, spec)
