"""Parameters as DTensors over the tensor-parallel axis."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement as MeshPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import I, Placement, S
from sp_compiler.base.shards import local_part
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.padding import stored_part


def mesh_placement(placement: Placement) -> MeshPlacement:
    """The DTensor placement of a stored parameter.

    Equal segments are what ``_StridedShard`` describes, so ``full_tensor()`` is right for them.
    DTensor cannot describe unequal ones: their ``full_tensor()`` has the segments' rows in rank
    order, and ``state_dict()`` of the module puts them right.
    """
    if not placement.is_sharded:
        return Replicate()
    if len(placement.segments) > 1 and len(set(placement.segments)) == 1:
        return _StridedShard(placement.dim, split_factor=len(placement.segments))
    return Shard(placement.dim)


def tensor_spec(
    mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, where: Placement
) -> DTensorSpec:
    """Spec of a contiguous DTensor of global ``shape``."""
    stride = torch.empty(shape, dtype=dtype, device="meta").stride()
    return DTensorSpec(mesh, (mesh_placement(where),), TensorMeta(shape, stride, dtype))


def distributed_parameter(parameter: nn.Parameter, group: TensorParallelGroup) -> nn.Parameter:
    """``parameter`` as a replicated DTensor that takes its storage over; itself for one rank.

    Attributes that the user set on the parameter are kept.

    Raises:
        ArgumentError: the parameter is a DTensor already, or has hooks that would be lost.
    """
    if group.mesh is None:
        return parameter
    if isinstance(parameter, DTensor):
        raise ArgumentError(
            "the model's parameters are DTensors already; compile the model before any other "
            "parallelism is applied to it"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ArgumentError(
            "a parameter of the model has hooks; register them on the parameters of the compiled "
            "module, after sp_compiler.compile"
        )
    whole = parameter.detach().contiguous()
    spec = tensor_spec(group.mesh, whole.shape, whole.dtype, I)
    result = nn.Parameter(
        DTensor(whole, spec, requires_grad=False), requires_grad=parameter.requires_grad
    )
    result.__dict__.update(vars(parameter))
    return result


@torch.no_grad()
def place(parameter: Tensor, placement: Placement, group: TensorParallelGroup) -> None:
    """Turn a replicated DTensor, in place, into one placed as ``placement``.

    The object stays the same one, so optimizers, hooks and ties that hold it stay right; only its
    local part and its spec are exchanged (its global shape does not change).
    """
    if group.mesh is None or not placement.is_sharded:
        return
    distributed = cast(DTensor, parameter)
    whole = distributed._local_tensor
    if tuple(whole.shape) != tuple(parameter.shape):
        raise ArgumentError("a parameter can be placed only once")
    distributed._local_tensor = stored_part(whole, placement, group.rank, group.world_size)
    distributed._spec = tensor_spec(group.mesh, parameter.shape, whole.dtype, placement)


@torch.no_grad()
def to_true_chunk(parameter: DTensor, placement: Placement, group: TensorParallelGroup) -> DTensor:
    """A segmented parameter as an ordinary ``Shard(dim)`` DTensor; every rank must call it.

    Its local parts are contiguous chunks of the true tensor, so checkpoints can reshard them.
    """
    whole = group.communicator.all_gather(parameter._local_tensor, str(placement), "I")
    plain = S(placement.dim)
    spec = tensor_spec(parameter.device_mesh, parameter.shape, whole.dtype, plain)
    return DTensor(
        local_part(whole, plain, group.rank, group.world_size), spec, requires_grad=False
    )


@torch.no_grad()
def from_loaded(
    value: Tensor, parameter: DTensor, placement: Placement, group: TensorParallelGroup
) -> Tensor:
    """What a checkpoint holds, a whole tensor or a DTensor, placed like ``parameter``."""
    if isinstance(value, DTensor):
        if value._spec.placements == parameter._spec.placements and len(placement.segments) < 2:
            return value
        value = value.full_tensor()
    if value.shape != parameter.shape:
        return value
    local = stored_part(value, placement, group.rank, group.world_size)
    spec = tensor_spec(parameter.device_mesh, parameter.shape, value.dtype, placement)
    return DTensor(local, spec, requires_grad=False)


def optimizers_of(parameters: Iterable[Tensor]) -> list[tuple[Optimizer, bool]]:
    """The living optimizers that hold one of ``parameters``, and whether they have state for it."""
    ids = {id(parameter) for parameter in parameters}
    found = []
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), Optimizer):
            continue
        held = [
            parameter
            for param_group in getattr(candidate, "param_groups", ())
            for parameter in param_group["params"]
            if id(parameter) in ids
        ]
        if held:
            found.append((candidate, any(candidate.state.get(parameter) for parameter in held)))
    return found
