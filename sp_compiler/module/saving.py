"""Saving of weights: full tensors, never one rank's part by mistake."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.runtime.group import TensorParallelGroup


@torch.no_grad()
def full_state_dict(module: nn.Module, group: TensorParallelGroup) -> dict[str, Tensor]:
    """Unsharded state of ``module`` on rank 0, on the CPU; ``{}`` on the others; collective."""
    # One rank in all, for those of other batches hold the same weights.
    keeps = group.rank == group.data.rank == 0
    made: dict[int, Any] = {}
    result = {}
    # keep_vars: tied parameters are one object then, and stay one tensor.
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in made:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if isinstance(full, Tensor):
                # Dropped at once on the other ranks: none of them has room for a whole model.
                full = full.detach().cpu() if keeps else None
            # With its source: another object could get its id once it is gone.
            made[id(value)] = value, full
        result[name] = made[id(value)][1]
    return result if keeps else {}


def refuse_to_pickle(value: DTensor) -> None:
    """Let pickling of a sharded ``value`` raise: a file of rank 0 would have a part of it only."""
    if any(not where.is_replicate() for where in value.placements):
        # Of the object, not of its class: copies and what checkpoint libraries make of it are free.
        value.__reduce_ex__ = _raise_partial  # type: ignore[method-assign]


def _raise_partial(protocol: Any) -> NoReturn:
    raise UnsupportedError(
        "a sharded DTensor cannot be pickled (torch.save): the file would have this rank's part "
        "only. Whole weights: state = module.full_state_dict() on all ranks, then save it on rank "
        "0. Sharded checkpoints, optimizers too: torch.distributed.checkpoint.save on all ranks"
    )
