"""Means of losses of DTensors over the elements and labels of all ranks.

In PyTorch, the mean of an elementwise loss (``F.mse_loss``, ``smooth_l1_loss``, ``huber_loss``,
``soft_margin_loss``, ``binary_cross_entropy`` with and without logits) of a sharded tensor is the
mean over the means of parts, which may have different sizes, and its gradient is too large by the
number of parts: torch divides by the number of this rank's elements. Here it is divided by the
number of all elements.

``F.cross_entropy`` and ``F.nll_loss`` of sharded rows are the mean over the means of the ranks,
although these may have different numbers of labels, or weights. If a rank has no labels, the result
is NaN, and parts of different sizes are refused. Here the sum over all ranks is divided by the
weight of all labels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.ir.fx import named_arguments
from sp_compiler.module.dtensors.gathered_views import (
    by_rule_or_whole,
    full_value,
    handle,
    replicated,
    run_past_handlers,
)

# They have no sharding rules: DTensor derives placements from their decompositions.
_LOSSES_OF_ELEMENTS = tuple(
    getattr(torch.ops.aten, name + direction).default
    for name in (
        *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    )
    for direction in ("", "_backward")
    if hasattr(torch.ops.aten, name + direction)
)
_LOSSES_OF_ROWS = (
    torch.ops.aten.nll_loss_forward.default,
    torch.ops.aten.nll_loss2d_forward.default,
)
_MEAN, _SUM = 1, 2  # values of ATen's enum Reduction


@functools.cache
def divide_by_all_elements() -> None:
    """Compute means of elementwise losses, and their gradients, over all ranks, in this process."""
    handle(_LOSSES_OF_ELEMENTS, _mean_over_all)


@functools.cache
def divide_by_all_labels() -> None:
    """Compute means of losses of rows over all ranks, in this process."""
    handle(_LOSSES_OF_ROWS, _mean_over_labels)


def _mean_over_all(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a loss, or its gradient; a mean as the sum, divided by the number of elements."""
    given = named_arguments(operation, args, kwargs)
    if given["reduction"] != _MEAN:
        return by_rule_or_whole(operation, [*given.values()], {})
    given["reduction"] = _SUM
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    # In float16 a sum, or a gradient before it is divided, would overflow.
    is_narrow = {x.dtype for x in tensors.values()} == {torch.float16}
    if is_narrow:
        given |= {name: x.float() for name, x in tensors.items()}
    total = by_rule_or_whole(operation, [*given.values()], {})
    mean = total / torch.broadcast_shapes(*(x.shape for x in tensors.values())).numel()
    return mean.half() if is_narrow else mean


def _mean_over_labels(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a loss of rows; a mean as the sum, divided by the weight of the labels."""
    given = named_arguments(operation, args, kwargs)
    if given["reduction"] != _MEAN:
        return run_past_handlers(operation, args, kwargs)[0]
    dtype, mesh = given["self"].dtype, given["self"].device_mesh
    # In 16 bits, a sum of many rows would overflow.
    wide = torch.promote_types(dtype, torch.float32)
    for name in ("self", "weight"):
        given[name] = None if given[name] is None else given[name].to(wide)
    given["reduction"] = _SUM
    sums, _ = run_past_handlers(operation, [*given.values()], {})
    total, weight = map(full_value, sums)
    return tuple(replicated(x.to(dtype), mesh) for x in (total / weight, weight))
