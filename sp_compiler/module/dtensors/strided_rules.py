"""Fixes of DTensor rules that ignore strided shards on torch 2.11 and give wrong results.

Without them, ``softmax`` and ``cumsum`` over such a dim, and selections of its rows, would use only
each rank's part, a dim whose index changes would get the placement of another, and ``t()`` would
raise an error. From torch 2.12 on, DTensor's rules handle strided shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import _math_ops, _tensor_ops
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.torch_version import TorchVersion


def teach_strided_rules() -> None:
    """Wrap the helpers with which those rules find and move sharded dims, on torch 2.11 only."""
    if TorchVersion(torch.__version__) >= "2.12":
        return
    for module, names in (
        (_math_ops, ["replicate_reduction_dims"]),
        (_tensor_ops, ["unshard_tensor_dim", "replicate_tensor_dim"]),
    ):
        for name in names:
            setattr(module, name, _first_replicated(getattr(module, name)))
    for name, step in (("shift_shard_dims_after_insert", 1), ("shift_shard_dims_after_remove", -1)):
        setattr(_tensor_ops, name, _shifting(getattr(_tensor_ops, name), step))
    is_sharded = _tensor_ops.is_tensor_dim_sharded

    @functools.wraps(is_sharded)
    def is_tensor_dim_sharded(spec: DTensorSpec, dim: int) -> bool:
        return is_sharded(spec, dim) or any(_is_strided(p, [dim]) for p in spec.placements)

    def is_any_dim_sharded(spec: DTensorSpec) -> bool:
        return any(isinstance(p, Shard | _StridedShard) for p in spec.placements)

    _tensor_ops.is_tensor_dim_sharded = is_tensor_dim_sharded
    DTensorSpec.is_sharded = is_any_dim_sharded  # type: ignore[method-assign, assignment]
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    # Its rule swaps only the dims of ordinary shards; that of transpose() handles strided ones.
    handlers[torch.ops.aten.t.default] = lambda _, args, kwargs: args[0].transpose(0, -1)


def _first_replicated(unsharded: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``unsharded``, extended to replicate strided shards of ``dim`` too."""

    @functools.wraps(unsharded)
    def wrapped(placements: Sequence[Placement], dim: int | list[int]) -> Any:
        dims = dim if isinstance(dim, list) else [dim]
        return unsharded(tuple(Replicate() if _is_strided(p, dims) else p for p in placements), dim)

    return wrapped


def _shifting(shift: Callable[..., Any], step: int) -> Callable[..., Any]:
    """Return ``shift``, extended to move the dims of strided shards by ``step`` too."""

    @functools.wraps(shift)
    def wrapped(placements: Sequence[Placement], at: int = 0) -> list[Placement]:
        first = at if step > 0 else at + 1
        return [
            _StridedShard(p.dim + step, split_factor=p.split_factor)
            if isinstance(p, _StridedShard) and p.dim >= first
            else p
            for p in shift(placements, at)
        ]

    return wrapped


def _is_strided(placement: Placement, dims: list[int]) -> bool:
    return isinstance(placement, _StridedShard) and placement.dim in dims
