"""``torch.amp.GradScaler`` on a pipeline: whether a gradient of any stage is infinite.

A scaler checks the gradients that this rank has. An overflow in the backward of one stage reaches
the stages before it, but not those after it: they would take a step that the others skip, tied
weights would differ, and so would the scale of each rank::

    stage 0         stage 1         stage 2
    grads inf  <──  grads inf       grads finite
    skips           skips           steps: here it skips too
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sp_compiler.grid.gradient_norm import communication_device
from sp_compiler.grid.watched_group import watched

_Found = dict[torch.device, Tensor]
"""Device to a number that is not 0 if a gradient on it is infinite or NaN."""


class _Pipeline(Protocol):
    @property
    def pp_group(self) -> dist.ProcessGroup: ...

    def parameters(self) -> Iterator[Any]: ...


# In the order in which they were made, which is the same on all ranks.
_PIPELINES = WeakValueDictionary[int, _Pipeline]()
_NUMBERS = itertools.count()


def skip_steps_together(pipeline: _Pipeline) -> None:
    """Make all ranks of ``pipeline`` skip a step of a ``GradScaler`` if one of them would."""
    _PIPELINES[next(_NUMBERS)] = pipeline
    _patch_scalers()


@functools.cache
def _patch_scalers() -> None:
    # Both ways of a scaler to a step, through unscale_() and of a fused optimizer, call it once for
    # each optimizer. The operator it calls for each dtype will not do: stages differ in dtypes.
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_on_all_stages(
        scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> _Found:
        found = unscale(scaler, optimizer, *args, **kwargs)
        own = [value for group in optimizer.param_groups for value in group["params"]]
        ids = set(map(id, own))
        for pipeline in list(_PIPELINES.values()):
            if any(id(parameter) in ids for parameter in pipeline.parameters()):
                grads = [value.grad for value in own if value.grad is not None]
                _share(found, grads, pipeline.pp_group)
        return found

    torch.amp.GradScaler._unscale_grads_ = unscale_on_all_stages  # type: ignore[method-assign, assignment]


def _share(found: _Found, grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the numbers in ``found`` by their maximum over the ranks of ``group``."""
    device = communication_device(grads)
    # A stage without gradients, whose parameters are frozen, takes part too; without a number,
    # which torch requires of every step, it would raise an error.
    largest = torch.zeros((), dtype=torch.float32, device=device)
    for number in found.values():
        largest = torch.maximum(largest, number.to(device))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=watched(group))
    for number in found.values():
        number.copy_(largest)
    found.setdefault(device, largest)
