"""Tests in a forward of whether all values of a tensor are finite.

``if not torch.isfinite(x).all(): x = x.clamp(...)`` reads a number that is unknown in a capture.
The program is the one for finite values. If the actual answer differs, everything that the program
returns becomes NaN::

    if torch.isinf(x).any(): ...       =>       asked = x.isinf().any()
    return loss                                 return loss * where(asked != False, nan, 1)

The checks of ``torch.distributions`` for valid arguments are treated in the same way.
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
"""Elementwise tests, and the elements of their result if all values are finite."""
_EVERY: Mapping[object, bool] = {
    torch.all: True,
    Tensor.all: True,
    torch.any: False,
    Tensor.any: False,
    torch._is_all_true: True,
}
"""Reductions, and the value that all elements of the operand must have for a known result."""
_COUNTS = (torch.sum, Tensor.sum)
"""Reductions whose result is zero if all elements of the operand are known to be zero."""
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
"""Comparisons with a number, such as a count of non-finite elements with zero."""


@dataclass(frozen=True)
class _Answer:
    """Value of the elements of a tensor if all values of the tested tensors are finite.

    Attributes:
        tensor: the tensor with these elements; kept alive, so that no other tensor gets its id.
        version: version of the tensor: a later write may have changed it.
        value: value of each element; a bool, or a count.
    """

    tensor: Tensor
    version: int
    value: int


@dataclass
class FiniteTests:
    """Tests for finite values in a forward, during a capture."""

    _answers: dict[int, _Answer] = field(default_factory=dict)
    _others: list[Tensor] = field(default_factory=list)  # whether the actual answer differs

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note ``result`` of ``func(*args)`` if it is known for finite or valid values; only the
        mode that intercepts ``func`` may call this, since its caller is looked up."""
        if not args or not isinstance(result, Tensor):
            return
        value: int | None
        if func in _TESTS:
            value = _TESTS[func] if args[0].is_floating_point() else None
        elif func in _EVERY:
            known = self._known(args[0])
            # A distribution raises if the answer differs. Its frame is that of the mode's caller.
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
        """Return the number in ``tensor`` for finite values; ``None`` if it is not such a test."""
        value = self._known(tensor)
        if value is not None:
            self._others.append(tensor.detach() != value)
        return value

    def shown(self, outputs: Any) -> Any:
        """Return ``outputs`` of the forward, or NaN if an actual answer differs.

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
                "the forward tests whether activations are finite, but returns no floating-point "
                "tensor that could show that they are not; test outside of forward"
            )
        # By multiplication, so that gradients are NaN as well.
        marked = [
            x * torch.where(others.any(), math.nan, 1.0).to(x.dtype) if is_float else x
            for x, is_float in zip(leaves, floats, strict=True)
        ]
        return pytree.tree_unflatten(marked, spec)
