"""``torch.amp.GradScaler`` on DTensors: whether a gradient on any rank is infinite.

It checks all gradients of one dtype in one operation, on each rank its own parts. DTensor reduces
the result only over the axes of the *first* gradient. If that one is replicated and others are
sharded, or they are sharded over more axes, some ranks skip a step that others take, and the
parameters silently diverge. Here the result is reduced over all axes that shard any gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.grid.gradient_norm import communication_device, sharded_over
from sp_compiler.grid.watched_group import watched
from sp_compiler.module.dtensors.gathered_views import handle

_OPERATION = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def find_overflows_of_all_ranks() -> None:
    """Make all ranks skip a step if one of them would, for the process."""
    handle([_OPERATION], _unscale)


def _unscale(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run ``operation(gradients, found_inf, inverse_scale)``."""
    grads, found, inverse_scale = cast("tuple[Sequence[Tensor], Tensor, Tensor]", args)
    parts = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]
    operation(parts, found, inverse_scale, **kwargs)
    groups = {axis: group for grad in grads for axis, group in sharded_over(grad).items()}
    # Gradients that FSDP offloads are not on the device that communicates.
    largest = found.to(communication_device(grads))
    for group in groups.values():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=watched(group))
    found.copy_(largest)
