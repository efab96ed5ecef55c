"""Parameters as DTensors over the tensor-parallel axis."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement as MeshPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.placement import I, Placement, shard_of
from sp_compiler.module.dtensors.patches import refuse_to_pickle
from sp_compiler.module.dtensors.segmented_shard import (
    distribute_full_tensors,
    own_shard,
    segmented_shard,
)
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.mesh_axes import EXPERT_AXIS, TENSOR_AXIS
from sp_compiler.runtime.padding import padded_part, stored_part, stored_shape
from sp_compiler.runtime.parameter_gradients import local_tensor


def mesh_placement(placement: Placement) -> MeshPlacement:
    """Return the DTensor placement of a stored parameter or of an output.

    A dim that is padded by elements is an ordinary shard: DTensor also makes chunks of equal size
    except for the last ones. For chunks of entire heads we define our own placement.
    """
    if not placement.is_sharded:
        return Replicate()
    if not placement.is_in_order:
        return segmented_shard(placement.dim, placement.segments, placement.units)
    return Shard(placement.dim)


def tensor_spec(
    mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, where: Placement
) -> DTensorSpec:
    """Return the spec of a contiguous DTensor of global ``shape``."""
    stride = torch.empty(shape, dtype=dtype, device="meta").stride()
    return DTensorSpec(mesh, (mesh_placement(where),), TensorMeta(shape, stride, dtype))


def distributed_parameter(parameter: nn.Parameter, group: TensorParallelGroup) -> nn.Parameter:
    """Return ``parameter`` as a replicated DTensor that takes over its storage; itself for one
    rank.

    Attributes that the user set on the parameter are preserved.

    Raises:
        ArgumentError: the parameter is already a DTensor, or has hooks that would be lost.
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
    # Kernels and collectives need contiguous shards; a contiguous parameter keeps its memory.
    replicated = parameter.detach().contiguous()
    spec = tensor_spec(group.mesh, replicated.shape, replicated.dtype, I)
    result = nn.Parameter(
        DTensor(replicated, spec, requires_grad=False), requires_grad=parameter.requires_grad
    )
    # Marks that optimizers and trainers read (no_weight_decay, allreduce, ...).
    result.__dict__.update(vars(parameter))
    return result


@torch.no_grad()
def place(parameter: Tensor, placement: Placement, group: TensorParallelGroup) -> None:
    """Turn a replicated DTensor, in place, into one with ``placement``.

    It remains the same object, so optimizers, hooks and ties that refer to it stay valid. Only its
    local part and its spec are replaced; its global shape does not change.
    """
    if group.mesh is None or not placement.is_sharded:
        return
    distribute_full_tensors()
    distributed = cast(DTensor, parameter)
    replicated = distributed._local_tensor
    if tuple(replicated.shape) != tuple(parameter.shape):
        raise ArgumentError("a parameter can be placed only once")
    distributed._local_tensor = stored_part(replicated, placement, group.rank, group.world_size)
    distributed._spec = tensor_spec(group.mesh, parameter.shape, replicated.dtype, placement)
    refuse_to_pickle(distributed)


@torch.no_grad()
def divided(parameter: Tensor, placement: Placement, group: TensorParallelGroup) -> nn.Parameter:
    """Return this rank's part of a parameter with a matrix per expert, which is not placed yet.

    It is sharded over "ep" by experts, and over "tp" by ``placement``. It is a new object, since
    FSDP2 replaces it anyway.
    """
    mesh = group.expert_mesh
    assert mesh is not None
    own = local_tensor(parameter).chunk(mesh[EXPERT_AXIS].size())[mesh.get_local_rank(EXPERT_AXIS)]
    # Not a view, which would keep the experts of all ranks alive.
    part = stored_part(own, placement, group.rank, group.world_size).clone()
    where = (Shard(0),) if group.mesh is None else (Shard(0), mesh_placement(placement))
    stride = torch.empty(parameter.shape, device="meta").stride()
    spec = DTensorSpec(mesh, where, TensorMeta(parameter.shape, stride, parameter.dtype))
    result = nn.Parameter(
        DTensor(part, spec, requires_grad=False), requires_grad=parameter.requires_grad
    )
    result.__dict__.update(vars(parameter))
    refuse_to_pickle(cast(DTensor, result))
    return result


@torch.no_grad()
def unsharded(value: DTensor, placement: Placement, group: TensorParallelGroup) -> Tensor:
    """Return the unsharded tensor of a parameter, or of a tensor placed like one; all ranks must
    call it.

    If ``fully_shard`` has sharded this rank's part of the segments over another axis, that axis is
    gathered first, since no DTensor placement expresses it.
    """
    if placement.is_in_order or value.device_mesh.ndim == 1:
        return value.full_tensor()
    mesh, placements = _other_axes(value)
    shape = torch.Size(stored_shape(tuple(value.shape), placement, group.rank, group.world_size))
    part = DTensor.from_local(
        value._local_tensor,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    ).full_tensor()
    return group.communicator.all_gather(
        padded_part(part, placement, group.world_size), str(placement), "I"
    )


def to_true_chunk(value: DTensor, placement: Placement, group: TensorParallelGroup) -> DTensor:
    """Return a segmented parameter as an ordinary ``Shard(dim)`` DTensor; every rank must call it.

    Its local parts are contiguous chunks of the true tensor, so checkpoints can reshard them.
    """
    chunks = shard_of(value.shape[placement.dim], placement.dim, group.world_size)
    return _laid_out(unsharded(value, placement, group), chunks, value, group)


@torch.no_grad()
def from_loaded(
    value: Tensor, parameter: DTensor, placement: Placement, group: TensorParallelGroup
) -> Tensor:
    """Return a checkpoint's value, an unsharded tensor or a DTensor, placed like ``parameter``.

    Raises:
        UnsupportedError: it is the part of another rank.
    """
    if isinstance(value, DTensor):
        _check_rank(value)
        is_alike = value._spec.placements == parameter._spec.placements
        if is_alike and placement.is_in_order:
            return value
        value = unsharded(value, placement, group) if is_alike else value.full_tensor()
    if value.shape != parameter.shape:
        return value  # load_state_dict raises a better error
    return _laid_out(value, placement, parameter, group)


def _check_rank(value: DTensor) -> None:
    mesh = value.device_mesh
    # Copies can be pickled, and a mesh keeps the coordinate of the rank that pickled it.
    coordinate = mesh.get_coordinate()
    if coordinate is None or all(where.is_replicate() for where in value.placements):
        return
    owner, rank = int(mesh.mesh[tuple(coordinate)]), dist.get_rank()
    if owner != rank:
        raise UnsupportedError(
            f"a loaded DTensor of shape {tuple(value.shape)} has the part of rank {owner}, but "
            f"this is rank {rank}: torch.save of a copy of a sharded DTensor writes only one "
            "rank's part. Save module.full_state_dict(), called on all ranks, on rank 0, or use "
            "torch.distributed.checkpoint.save on all ranks"
        )


@torch.no_grad()
def _laid_out(
    full: Tensor, placement: Placement, like: DTensor, group: TensorParallelGroup
) -> DTensor:
    """Return ``full`` with ``placement`` over the axis "tp", and with those of ``like`` over other
    axes."""
    local = stored_part(full, placement, group.rank, group.world_size)
    local = own_part(local, like)
    names = like.device_mesh.mesh_dim_names or ()
    where = tuple(
        mesh_placement(placement) if name == TENSOR_AXIS else _beside(other, placement, group)
        for name, other in zip(names, like.placements, strict=True)
    )
    stride = torch.empty(full.shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, where, TensorMeta(full.shape, stride, full.dtype))
    return DTensor(local, spec, requires_grad=False)


def _beside(
    other: MeshPlacement, placement: Placement, group: TensorParallelGroup
) -> MeshPlacement:
    """Return the placement ``other`` of an FSDP axis next to an ordinary shard over "tp".

    PyTorch 2.11 does not know that segments shard their dim, and describes FSDP's chunks as chunks
    of the full tensor. They are chunks of this rank's part, in the part's own order.
    """
    is_chunk = placement.is_sharded and placement.is_in_order
    if is_chunk and type(other) is Shard and other.dim == placement.dim:
        return _StridedShard(other.dim, split_factor=group.world_size)
    return other


def own_part(part: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of its tensor-parallel ``part`` if ``like`` has other axes too."""
    if like.device_mesh.mesh_dim_names in (None, (TENSOR_AXIS,)):
        return part
    return own_shard(part, *_other_axes(like))


def _other_axes(value: DTensor) -> tuple[DeviceMesh, list[MeshPlacement]]:
    """Return the axes other than "tp", and the placements of this rank's tensor-parallel part over
    them."""
    names = value.device_mesh.mesh_dim_names or ()
    others = [index for index, name in enumerate(names) if name != TENSOR_AXIS]
    kept = [value.placements[index] for index in others]
    placements = [
        # FSDP uses a strided shard for chunks of the local part rather than of the full tensor.
        # They are chunks of this rank's experts too.
        Shard(where.dim) if isinstance(where, _StridedShard) and not _cut_again(kept, i) else where
        for i, where in enumerate(kept)
    ]
    return value.device_mesh[tuple(names[index] for index in others)], placements


def _cut_again(placements: Sequence[MeshPlacement], axis: int) -> bool:
    """Return whether an axis after ``axis`` shards the same dim."""
    dim = getattr(placements[axis], "dim", None)
    return any(getattr(other, "dim", None) == dim for other in placements[axis + 1 :])


def optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Return existing optimizers that hold one of ``parameters``."""
    # A scan of all objects takes a tenth of a second, and most models are compiled before there is
    # any optimizer. When the first one of a class is made, torch wraps and marks its ``step``.
    if not any(hasattr(kind.step, "hooked") for kind in _with_subclasses(Optimizer)):
        return []
    ids = {id(parameter) for parameter in parameters}
    optimizers = []
    # Parameters do not know their optimizers. By type, since isinstance would ask proxies for their
    # class.
    objects = gc.get_objects()
    # Types first, collected in C: usually none of hundreds of thousands of objects is an optimizer.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Optimizer)}
    for candidate in objects if kinds else ():
        if type(candidate) not in kinds:
            continue
        if any(
            id(parameter) in ids
            for param_group in getattr(candidate, "param_groups", ())
            for parameter in param_group["params"]
        ):
            optimizers.append(candidate)
    return optimizers


def are_held_by_modules_alone(model: nn.Module) -> bool:
    """Return whether only its modules refer to the parameters of ``model``.

    Then no optimizer does, and :func:`optimizers_of` need not scan all objects.
    """
    # Each table once: modules made by copy.copy share one.
    tables = list({id(m._parameters): m._parameters for m in model.modules()}.values())
    # Counted before anything here refers to a parameter. How many references the counting itself
    # adds depends on the interpreter.
    counts = [_reference_counts(table) for table in tables]
    (of_one,) = _reference_counts({"": object()})
    holders = Counter(id(parameter) for table in tables for parameter in table.values())
    # A model may list other parameters than those of its modules.
    return all(id(parameter) in holders for parameter in model.parameters()) and all(
        parameter is None or count - of_one < holders[id(parameter)]
        for table, of_table in zip(tables, counts, strict=True)
        for parameter, count in zip(table.values(), of_table, strict=True)
    )


def _reference_counts(values: Mapping[str, Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values.values()]


def _with_subclasses(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)
