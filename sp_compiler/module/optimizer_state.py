"""Optimizers' state in checkpoints: laid out like the parameters of the module's ``state_dict()``.

The state of a parameter with segments is placed like the parameter: a rank has rows of each
segment, while checkpoints need a contiguous range. ``Optimizer.state_dict()`` returns true chunks,
and ``load_state_dict`` converts these, or unsharded tensors, back. PyTorch has no hooks for future
optimizers, so these two methods are wrapped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sp_compiler.base.placement import Placement
from sp_compiler.module.dtensors.patches import refuse_to_pickle
from sp_compiler.module.module_tree import MirrorModule
from sp_compiler.module.parameters import from_loaded, optimizers_of, to_true_chunk
from sp_compiler.runtime.group import TensorParallelGroup

_Stored = tuple[DTensor, Placement, TensorParallelGroup]
# Weak, for the wrapped methods live as long as the process, and modules need not.
_MODULES: weakref.WeakSet[MirrorModule] = weakref.WeakSet()


@torch.no_grad()
def place_optimizer_state(
    parameters: Sequence[Tensor], placements: Mapping[int, Placement], group: TensorParallelGroup
) -> None:
    """Place what optimizers keep for parameters that have just been placed, like these.

    Adagrad makes its sums with the optimizer, others have state that was loaded, or made by
    ``get_state_dict``, before the first call.

    Args:
        parameters: those placed.
        placements: of them, by id.
        group: the ranks.
    """
    if group.mesh is None:
        return
    entries: dict[int, dict[str, Any]] = {}  # by identity: a wrapper shows those of its optimizer
    for optimizer in optimizers_of(parameters):
        for parameter in parameters:
            entry = optimizer.state.get(parameter, {})
            if not isinstance(parameter, DTensor) or id(entry) in entries:
                continue
            entries[id(entry)] = entry
            where = placements[id(parameter)]
            entry.update(_converted_entry(entry, (parameter, where, group), _as_stored))


def show_true_state(module: MirrorModule) -> None:
    """Enable this for every optimizer of ``module``, which is compiled for several ranks."""
    _wrap()
    _MODULES.add(module)


@functools.cache
def _wrap() -> None:
    """Wrap the two methods of ``Optimizer``, once for the process."""
    saved, load = Optimizer.state_dict, Optimizer.load_state_dict

    @functools.wraps(saved)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        return _converted(self, saved(self), _true_chunk)

    @functools.wraps(load)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        load(self, _converted(self, state_dict, _as_stored))

    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _true_chunk(
    value: Tensor, parameter: DTensor, where: Placement, group: TensorParallelGroup
) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    if not where.is_in_order:
        value = to_true_chunk(value, where, group)
    refuse_to_pickle(value)
    return value


def _as_stored(
    value: Tensor, parameter: DTensor, where: Placement, group: TensorParallelGroup
) -> Tensor:
    return from_loaded(value, parameter, where, group)


def _converted(
    optimizer: Optimizer, state_dict: dict[str, Any], convert: Callable[..., Tensor]
) -> dict[str, Any]:
    """Return a copy in which tensors as large as their parameter are converted by ``convert``."""
    # Looked up anew each time: parameters are placed and moved after their optimizer is made.
    stored = {
        id(parameter): (parameter, placement, module._sp_state.group)
        for module in _MODULES
        for parameter, placement in module._sp_state.stored()
    }
    if not any(id(p) in stored for group in optimizer.param_groups for p in group["params"]):
        return state_dict  # not ours, whatever its hooks made of it
    by_key: dict[Any, _Stored] = {}
    # Not strict: load_state_dict itself says best that groups do not fit.
    for own, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, key in zip(own["params"], theirs["params"], strict=False):
            if id(parameter) in stored:
                by_key[key] = stored[id(parameter)]
    state = {
        key: _converted_entry(entry, by_key[key], convert) if key in by_key else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _converted_entry(
    entry: Mapping[str, Any], stored: _Stored, convert: Callable[..., Tensor]
) -> dict[str, Any]:
    parameter = stored[0]
    return {
        key: convert(value, *stored)
        # A scalar parameter has the shape of a step count, which is no part of it.
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
        else value
        for key, value in entry.items()
    }
