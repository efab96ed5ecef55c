"""Data parallelism of a compiled module: FSDP2 on its blocks and on the remaining parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.placement import I, Placement
from sp_compiler.grid.fully_sharded import is_divided
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.mesh_axes import (
    REPLICATE_AXIS,
    SHARD_AXIS,
    DataAxes,
    shards_over_experts,
)

_REPLICATE_OPTIONS = {"mp_policy", "offload_policy"}
_SHARD_OPTIONS = _REPLICATE_OPTIONS | {"reshard_after_forward", "shard_placement_fn"}
_STAGE_OPTIONS = {"mp_policy", "shard_placement_fn"}
_POLICIES = {
    "mp_policy": (MixedPrecisionPolicy, "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
    # FSDP2 ignores policies of other types.
    "offload_policy": (OffloadPolicy, "CPUOffloadPolicy()"),
}


def checked_options(
    fsdp: bool | Mapping[str, Any], data: DataAxes, world_size: int
) -> Mapping[str, Any] | None:
    """Return the options for FSDP2; ``None`` if it is not to be applied.

    Args:
        fsdp: what the user passed.
        data: the axes to apply it over.
        world_size: number of tensor-parallel ranks.

    Raises:
        ArgumentError: an unknown option, a policy of another type, or no axis to apply it over.
        UnsupportedError: resharding to a part of the axis.
    """
    if not isinstance(fsdp, (bool, Mapping)):
        raise ArgumentError(f"fsdp={fsdp!r}: expected True, False or a dict of options")
    if isinstance(fsdp, Mapping) and data.mesh is None:
        raise ArgumentError(
            f"fsdp={dict(fsdp)!r} without an axis to apply it over: pass mesh= with an axis "
            '"dp_shard" or "dp_replicate" of several ranks'
        )
    # An empty dict applies FSDP2 with its defaults.
    if fsdp is False or data.mesh is None:
        return None
    options = {} if isinstance(fsdp, bool) else dict(fsdp)
    allowed = _REPLICATE_OPTIONS if _apply(data) is replicate else _SHARD_OPTIONS
    if unknown := sorted(map(str, options.keys() - allowed)):
        raise ArgumentError(
            f"fsdp has the options {', '.join(unknown)}; over {data.described()} it takes "
            f"{', '.join(sorted(allowed))}. For others pass fsdp=False and apply "
            "torch.distributed.fsdp.fully_shard to the module yourself"
        )
    # None means FSDP2's default, but FSDP2 does not accept None as a policy.
    options = {name: value for name, value in options.items() if value is not None}
    for name, (kind, example) in _POLICIES.items():
        policy = options.get(name)
        if policy is not None and not isinstance(policy, kind):
            raise ArgumentError(
                f"fsdp=dict({name}={policy!r}): expected a "
                f"torch.distributed.fsdp.{kind.__name__}, for example {example}"
            )
    reshard = options.get("reshard_after_forward")
    if isinstance(reshard, int) and not isinstance(reshard, bool) and world_size > 1:
        raise UnsupportedError(
            f"fsdp=dict(reshard_after_forward={reshard}): PyTorch does not reshard DTensors to "
            "a part of the axis yet; pass True or False"
        )
    return options


def checked_stage_options(
    fsdp: bool | Mapping[str, Any], data: DataAxes
) -> Mapping[str, Any] | None:
    """Return the options for FSDP2 on the stages of a pipeline, ``None`` without data axes.

    Args:
        fsdp: what the user passed.
        data: the axes to apply it over.

    Raises:
        ArgumentError: ``False`` although there are data axes, or an option that stages do not
            support.
    """
    if fsdp is False and data.mesh is not None:
        raise ArgumentError(
            f"fsdp=False, but the mesh has {data.described()}: a pipeline gathers parameters and "
            "reduces gradients once per step, so it applies FSDP2 itself; pass True or a dict of "
            "options, or use a mesh without these axes and reduce gradients between step() and "
            "optimizer.step()"
        )
    options = fsdp if isinstance(fsdp, Mapping) else {}
    if unknown := sorted(map(str, options.keys() - _STAGE_OPTIONS)):
        raise ArgumentError(
            f"fsdp has the options {', '.join(unknown)}; a pipeline, which keeps the parameters of "
            "its stages gathered on the device from the first to the last microbatch of a step, "
            f"takes {', '.join(sorted(_STAGE_OPTIONS))}"
        )
    return checked_options(fsdp, data, world_size=1)


def refuse_with_experts(data: DataAxes, fsdp: bool | Mapping[str, Any], *, verify: bool) -> None:
    """Refuse arguments that do not work if experts are divided over ranks of ``data``.

    Raises:
        ArgumentError: FSDP2 is left to the user.
        UnsupportedError: a verification, or a PyTorch before 2.12.
    """
    if data.num_expert_ranks == 1:
        return
    if fsdp is False:
        raise ArgumentError(
            'fsdp=False, but the mesh has an axis "ep": experts are sharded over other ranks than '
            "other parameters, and sp_compiler has to configure FSDP2 for this; pass True or a "
            "dict of options"
        )
    if verify:
        raise UnsupportedError(
            'verify=True with an axis "ep": simulated ranks have one batch, but divided experts '
            "need rows of others; call sp_compiler.verify(model, example_inputs, tp=...), "
            "which checks the same model with all experts on every rank"
        )
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise UnsupportedError(
            'an axis "ep" needs PyTorch 2.12 or later, whose FSDP2 shards the parameters of one '
            f"block over different ranks; this is {torch.__version__}"
        )


def refuse_scalars(model: nn.Module) -> None:
    """Raise an error for parameters that FSDP2 cannot shard, before the model is taken over.

    Raises:
        UnsupportedError: with the names of parameters without dimensions.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if names:
        raise UnsupportedError(
            f"parameters without dimensions ({', '.join(map(repr, names))}): FSDP2 shards the "
            "first dim; make each a tensor of one element, nn.Parameter(value.reshape(1))"
        )


def apply_data_parallelism(
    root: nn.Module,
    compiled: CompiledProgram,
    group: TensorParallelGroup,
    options: Mapping[str, Any],
) -> None:
    """Apply ``fully_shard`` to blocks and root, or ``replicate`` if nothing shards parameters.

    Args:
        root: the compiled module.
        compiled: the program whose blocks are wrapped.
        group: with the data axes.
        options: of ``fully_shard`` or ``replicate``.

    Raises:
        ArgumentError: parameters, which are replaced, have hooks.
        UnsupportedError: a block trains parameters of several dtypes, or a rank has no part of a
            parameter.
    """
    _refuse_hooks(root)
    _refuse_empty_parts(root, compiled.param_placements, group.world_size)
    blocks = list(_self_contained_blocks(root, compiled))
    _refuse_mixed_dtypes(root, [*blocks, ""])
    mesh, apply = group.data.mesh, _apply(group.data)
    if group.grid is not None:
        mesh, options = _with_experts_apart(group.grid, options)
    assert mesh is not None
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    # Only the module's inputs and outputs are cast: code between blocks is compiled for its dtypes.
    inside = {
        **options,
        "mp_policy": replace(policy, output_dtype=None, cast_forward_inputs=False),
    }
    # The root last: there FSDP2 manages the parameters that no block has taken.
    for path in blocks:
        apply(root.get_submodule(path), mesh=mesh, **inside)
    apply(root, mesh=mesh, **options)


def _refuse_hooks(root: nn.Module) -> None:
    """Raise an error for hooks that would be lost."""
    for name, parameter in root.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"{name} has hooks and is not placed yet, and fully_shard replaces it; pass "
                "example_inputs to sp_compiler.compile (or call the module once), and register "
                "the hooks afterwards, with register_post_accumulate_grad_hook"
            )


def _refuse_empty_parts(
    root: nn.Module, placements: Mapping[str, Placement], world_size: int
) -> None:
    """Raise an error, on all ranks, if a rank's part of a parameter is only padding, as the last
    rank's may be: FSDP2 cannot reduce it."""
    for name, parameter in root.named_parameters():
        parts = placements.get(name, I).true_parts(world_size - 1, world_size)
        # There are no segments where all ranks have equal parts.
        if parts and not any(parts) and parameter.numel():
            raise UnsupportedError(
                f"{name!r} of shape {tuple(parameter.shape)} is divided over {world_size} ranks of "
                "tp, and the last rank gets none of it, like a rank without attention heads; FSDP2 "
                "cannot shard an empty part: use fewer ranks on tp, so that each has a head, or "
                "hints= that replicate the parameter"
            )


def _refuse_mixed_dtypes(root: nn.Module, wrapped: Iterable[str]) -> None:
    """Raise an error with names, because FSDP2 raises one only in the first step, without names.

    Args:
        wrapped: paths of the modules to which it is applied, each before those around it.
    """
    seen: set[int] = set()
    for path in wrapped:
        own = [
            (f"{path}.{name}" if path else name, parameter)
            for name, parameter in root.get_submodule(path).named_parameters()
            if parameter.requires_grad and id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in own)
        first = {parameter.dtype: name for name, parameter in reversed(own)}
        if len(first) > 1:
            found = ", ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
            where = f"block {path!r}" if path else "the model outside of its blocks"
            raise UnsupportedError(
                f"{where} trains parameters of several dtypes ({found}): FSDP2 reduces their "
                "gradients together, in one dtype; cast them to one dtype before compiling, or "
                "freeze those of other dtypes (fsdp=dict(mp_policy=...) chooses the compute dtype)"
            )


def _apply(data: DataAxes) -> Any:
    return replicate if data.names == (REPLICATE_AXIS,) else fully_shard


def _with_experts_apart(
    grid: DeviceMesh, options: Mapping[str, Any]
) -> tuple[DeviceMesh, Mapping[str, Any]]:
    """Return the mesh that shards most parameters, and options that shard those of experts.

    The ranks of "ep" have different batches and the same parameters, except for experts. So "ep"
    and "dp_shard" together shard the other parameters; only "dp_shard" shards a rank's experts.
    """
    shards = shards_over_experts(grid)
    experts: Any
    if grid[REPLICATE_AXIS].size() > 1:
        shards = DeviceMesh._concatenate([grid[REPLICATE_AXIS], shards])
        experts = _fsdp_common.HSDPMeshInfo(grid[REPLICATE_AXIS, SHARD_AXIS], 1, 0)
    else:
        experts = _fsdp_common.FSDPMeshInfo(grid[SHARD_AXIS], 0)
    asked = options.get("shard_placement_fn") or (lambda parameter: None)

    def placed(parameter: nn.Parameter) -> Any:
        where = asked(parameter)
        if not isinstance(parameter, DTensor) or not is_divided(parameter):
            return where
        return _fsdp_common.ShardPlacementResult(where, experts)

    return shards, {**options, "shard_placement_fn": placed}


def _self_contained_blocks(root: nn.Module, compiled: CompiledProgram) -> Iterable[str]:
    """Yield paths of the blocks whose parameters nothing else uses, innermost first.

    FSDP gathers a block's parameters only during its call; parameters that others use too stay with
    the root.
    """
    users: dict[str, set[str]] = {}
    for call in compiled.program.calls:
        for ref in call.args:
            if ref.kind == "param":
                users.setdefault(compiled.param_name(ref.name), set()).add(call.path)
    paths = {call.path for call in compiled.program.calls if call.path}
    names = {id(p): name for name, p in root.named_parameters()}
    owners: dict[str, set[int]] = {
        path: {id(p) for p in root.get_submodule(path).parameters()} for path in paths
    }
    for path in reversed([path for path, _ in root.named_modules()]):
        # Blocks on other stages of a pipeline have no parameters here.
        if not owners.get(path):
            continue
        # Including parameters of a block inside another one, which belong to both.
        shared = set().union(*(ids for other, ids in owners.items() if other != path))
        if owners[path] & shared:
            continue
        if all(users.get(names[key], {path}) == {path} for key in owners[path]):
            yield path
