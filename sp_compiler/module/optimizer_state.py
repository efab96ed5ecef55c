"""Optimizer state in checkpoints: laid out like the parameters of the module's ``state_dict()``.

The state of a parameter with segments is placed like the parameter: a rank has rows of each
segment, while checkpoints need a contiguous range. ``Optimizer.state_dict()`` returns true chunks,
and ``load_state_dict`` converts these, or unsharded tensors, back. These two methods are wrapped,
since PyTorch has no hooks for optimizers that do not exist yet.
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
# Weak references, since the wrapped methods live as long as the process.
_MODULES: weakref.WeakSet[MirrorModule] = weakref.WeakSet()


@torch.no_grad()
def place_optimizer_state(
    parameters: Sequence[Tensor], placements: Mapping[int, Placement], group: TensorParallelGroup
) -> None:
    """Place the optimizer state of parameters that have just been placed, like the parameters.

    Adagrad creates its sums in its constructor. Other optimizers may have state that was loaded, or
    created by ``get_state_dict``, before the first call.

    Args:
        parameters: the parameters that were placed.
        placements: their placements, by id.
        group: the ranks.
    """
    if group.mesh is None:
        return
    entries: dict[int, dict[str, Any]] = {}  # by identity: a wrapper shares its optimizer's entries
    for optimizer in optimizers_of(parameters):
        for parameter in parameters:
            entry = optimizer.state.get(parameter, {})
            if not isinstance(parameter, DTensor) or id(entry) in entries:
                continue
            entries[id(entry)] = entry
            where = placements[id(parameter)]
            entry.update(_converted_entry(entry, (parameter, where, group), _as_stored))


def show_true_state(module: MirrorModule) -> None:
    """Convert the state of every optimizer of ``module``, which is compiled for several ranks."""
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
    """Return a copy in which tensors of their parameter's shape are converted by ``convert``."""
    # Looked up each time: parameters may be placed and moved after their optimizer is made.
    stored = {
        id(parameter): (parameter, placement, module._sp_state.group)
        for module in _MODULES
        for parameter, placement in module._sp_state.stored()
    }
    if not any(id(p) in stored for group in optimizer.param_groups for p in group["params"]):
        return state_dict  # an optimizer of other parameters; its hooks may have changed the dict
    by_key: dict[Any, _Stored] = {}
    # Not strict: load_state_dict itself raises a better error for mismatched groups.
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
        # The step count has the shape of a scalar parameter, but is not sharded like it.
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
        else value
        for key, value in entry.items()
    }
