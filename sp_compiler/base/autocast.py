"""Autocast: its casts are recorded when a model is captured, and not repeated afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# Device types on which a model may run: torch has no list of those with autocast on.
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
    """Return :func:`without_autocast`, without its cost if no autocast is on.

    For generated code: forward runs under the caller's autocast, and so does a backward that is
    called there, whose float32 matmuls would be cast as well.
    """
    return without_autocast() if autocast_state() else contextlib.nullcontext()


Autocast = tuple[tuple[str, torch.dtype], ...]
"""Device and dtype of each autocast that is on."""


def autocast_state() -> Autocast:
    """Return the autocast states that are active now."""
    # In the order of _DEVICES, since the result is part of the cache key of programs.
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
def explicit_casts() -> Iterator[None]:
    """Record the casts of autocast inside of composite operators as nodes of the graph.

    In eager mode, autocast casts the operands of each matmul in them, and those of class losses.
    """
    _VF: Any = torch._VF
    # torch internals: autocast casts below the level at which these are recorded, so that a graph
    # without autocast would compute in another dtype.
    with (
        mock.patch.object(torch._VF, "einsum", _einsum(_VF.einsum), create=True),
        mock.patch.object(torch._VF, "tensordot", _product(_VF.tensordot), create=True),
        mock.patch.object(torch, "inner", _product(torch.inner)),
        mock.patch.object(torch.Tensor, "inner", _product(torch.Tensor.inner), create=True),
        mock.patch.object(torch.linalg, "multi_dot", _product(torch.linalg.multi_dot)),
        mock.patch.object(torch._C._nn, "nll_loss_nd", _nll_loss(torch._C._nn.nll_loss_nd)),
    ):
        yield


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives matmuls of ``x``; ``None`` if it is off."""
    device = x.device.type
    # No autocast exists for the meta device: asking for its state raises.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # As in autocast itself, float64 and integers are not cast.
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _einsum(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``einsum`` with casts. An equation that multiplies two operands and sums over shared
    labels is one matmul; any other is recorded as the operators that it decomposes into."""

    def einsum(equation: str, operands: Sequence[Tensor], **kwargs: Any) -> Tensor:
        dtype = autocast_dtype(operands[0])
        if dtype is None:
            return original(equation, operands, **kwargs)
        if not _is_product(equation, len(operands)):
            return torch.ops.aten.einsum.default.decompose(equation, list(operands), **kwargs)
        return original(equation, [_cast(x, dtype) for x in operands], **kwargs)

    return einsum


def _product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``original``, which runs one or several matmuls of all its tensors, with casts."""

    def product(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        dtype = autocast_dtype(tensors[0])
        # A 0-dim tensor scales each element, which is not a matmul. ``out=`` is refused by the
        # capture.
        if dtype is None or not all(x.dim() for x in tensors) or kwargs.get("out") is not None:
            return original(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda x: _cast(x, dtype), (args, kwargs))
        return original(*args, **kwargs)

    return product


def _nll_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any) -> Tensor:
        if autocast_dtype(x) is not None:  # losses are in float32, whatever the autocast dtype
            x = _cast(x, torch.float32)
            weight = None if weight is None else _cast(weight, torch.float32)
        return original(x, target, weight, *args)

    return nll_loss


def _is_product(equation: str, count: int) -> bool:
    """Return whether ``einsum`` runs ``equation`` as a single matmul."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    left, _, right = terms.partition(",")
    # Fewer labels than letters: an operand repeats one, and its diagonal is taken first.
    if count != 2 or not arrow or "." in equation or len({*left}) + len({*right}) < len(terms) - 1:
        return False
    both = {*left} & {*right}
    # A label of only one operand must be in the result, or it is summed before the matmul. At
    # least one shared label must not be: without a sum it is not a matmul.
    return {*left} ^ {*right} <= {*result} and bool(both - {*result})


def cast_back(values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Cast inputs or outputs of a block that hooks changed back to the dtypes for which the code
    was compiled.

    FSDP's mixed precision casts all of them, including masks and tables, to the parameters' dtype.
    """
    return [
        value.to(before.dtype)
        if isinstance(value, Tensor) and isinstance(before, Tensor) and value.dtype != before.dtype
        else value
        for value, before in zip(values, given, strict=True)
    ]
