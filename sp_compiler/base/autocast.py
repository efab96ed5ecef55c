"""Autocast: its casts are recorded when a model is captured, and are not repeated afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Every type of device that a model may run on: torch has no list of those with autocast on.
_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Run with autocast off: its casts are in the captured graph and must not happen twice."""
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def with_captured_casts() -> contextlib.AbstractContextManager[None]:
    """Return :func:`without_autocast`, which takes no time where no autocast is on.

    For generated code: forward runs under the caller's autocast, and so does a backward that is
    called there, whose products in float32 would be cast as well.
    """
    return without_autocast() if autocast_state() else contextlib.nullcontext()


Autocast = tuple[tuple[str, torch.dtype], ...]
"""Device and dtype of each autocast that is on."""


def autocast_state() -> Autocast:
    """Return the autocast states that are active now."""
    # In the order of _DEVICES: the result is part of the key under which programs are cached.
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def under_autocast(state: Autocast) -> Iterator[None]:
    """Context in which exactly the autocasts of ``state`` are active."""
    with without_autocast(), contextlib.ExitStack() as stack:
        for device, dtype in state:
            stack.enter_context(torch.autocast(device, dtype))
        yield


@contextlib.contextmanager
def explicit_einsum() -> Iterator[None]:
    """Record the casts that autocast does inside ``einsum``, before it, where the graph shows them.

    Eager casts the factors of each matrix product in it. An equation that multiplies two operands
    and sums over the labels that both have is one such product; any other is recorded as the
    operators that it decomposes to.
    """
    original = torch._VF.einsum  # type: ignore[attr-defined]

    def einsum(equation: str, operands: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        device = operands[0].device.type
        # No autocast exists for the meta device: asking for its state raises.
        if device == "meta" or not torch.is_autocast_enabled(device):
            return original(equation, operands, **kwargs)
        if not _is_product(equation, len(operands)):
            return torch.ops.aten.einsum.default.decompose(equation, list(operands), **kwargs)
        dtype = torch.get_autocast_dtype(device)
        # As autocast itself does: float64 and integers are left alone.
        is_cast = [x.is_floating_point() and x.dtype != torch.float64 for x in operands]
        cast = [x.to(dtype) if c else x for x, c in zip(operands, is_cast, strict=True)]
        return original(equation, cast, **kwargs)

    # torch internals: _VF.einsum, which torch.einsum calls. Autocast casts below the level at which
    # the operator is recorded, so that a graph without autocast would compute in another dtype.
    with mock.patch.object(torch._VF, "einsum", einsum, create=True):
        yield


def _is_product(equation: str, count: int) -> bool:
    """Return whether ``einsum`` runs ``equation`` as a single matrix product."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    left, _, right = terms.partition(",")
    # Fewer labels than letters: an operand repeats one, and its diagonal is taken first.
    if count != 2 or not arrow or "." in equation or len({*left}) + len({*right}) < len(terms) - 1:
        return False
    both = {*left} & {*right}
    # A label that only one operand has must be in the result: else it is summed before the
    # product. One that both have must not be: without a sum it is no matrix product.
    return {*left} ^ {*right} <= {*result} and bool(both - {*result})


def cast_back(values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Cast the inputs or outputs of a block that hooks changed back to the dtypes that the code is
    compiled for.

    FSDP's mixed precision casts them to the type of the parameters, masks and tables too.
    """
    return [
        value.to(before.dtype)
        if isinstance(value, Tensor) and isinstance(before, Tensor) and value.dtype != before.dtype
        else value
        for value, before in zip(values, given, strict=True)
    ]
