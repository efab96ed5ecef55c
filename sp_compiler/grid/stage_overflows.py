"""``torch.amp.GradScaler`` on a pipeline: whether a gradient of any stage is infinite.

A scaler checks the gradients that this rank has. An overflow in the backward of one stage reaches
the stages before it, but not those after it: they would take a step that the others skip, tied
weights would differ, and so would the scale of each rank::

    stage 0         stage 1         stage 2
    grads inf  <──  grads inf       grads finite
    skips           skips           steps: here it skips too

Several optimizers of a pipeline skip a step together, as in Megatron-Core: which of them belong
together cannot be told from one stage, which may have parameters of only some.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sp_compiler.grid.gradient_norm import communication_device
from sp_compiler.grid.watched_group import watched

_Found = dict[torch.device, Tensor]
"""By device, a number that is not 0 if a gradient on it is infinite or NaN."""


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
    decided = WeakKeyDictionary[torch.amp.GradScaler, _Decided]()

    @functools.wraps(unscale)
    def unscale_on_all_stages(
        scaler: torch.amp.GradScaler,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> _Found:
        found = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        own = {id(value) for group in optimizer.param_groups for value in group["params"]}
        for pipeline in list(_PIPELINES.values()):
            parameters = list(pipeline.parameters())
            if own.isdisjoint(map(id, parameters)):
                continue
            # What update() replaces, so that it stands for the step.
            step = scaler._per_optimizer_states
            if scaler not in decided or decided[scaler].step is not step:
                decided[scaler] = _Decided(step)
            largest = decided[scaler].largest
            if pipeline not in largest:
                others = [value for value in parameters if id(value) not in own]
                # Of an optimizer it reads the parameters alone; their gradients stay as they are.
                rest: Any = SimpleNamespace(param_groups=[{"params": others}])
                scale, finite = torch.ones_like(inv_scale), torch.zeros_like(found_inf)
                found_there = unscale(scaler, rest, scale, finite, True)
                grads = [value.grad for value in parameters if value.grad is not None]
                numbers = [*found.values(), *found_there.values()]
                device = communication_device(grads)
                largest[pipeline] = _largest(numbers, device, pipeline.pp_group)
            _raise_to(found, largest[pipeline])
        return found

    torch.amp.GradScaler._unscale_grads_ = unscale_on_all_stages  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class _Decided:
    """Which pipelines skip a step: a number that is not 0 if they do."""

    step: object
    largest: WeakKeyDictionary[_Pipeline, Tensor] = field(default_factory=WeakKeyDictionary)


def _largest(numbers: Sequence[Tensor], device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Return the maximum of ``numbers`` over the ranks of ``group``, on ``device``."""
    # A stage without gradients, whose parameters are frozen, takes part too.
    largest = torch.zeros((), dtype=torch.float32, device=device)
    for number in numbers:
        largest = torch.maximum(largest, number.to(device))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=watched(group))
    return largest


def _raise_to(found: _Found, largest: Tensor) -> None:
    """Set the numbers of an optimizer to ``largest``."""
    for number in found.values():
        number.copy_(largest)
    # Without a number, which torch requires of every step, a stage without gradients would raise an
    # error.
    found.setdefault(largest.device, largest.clone())
