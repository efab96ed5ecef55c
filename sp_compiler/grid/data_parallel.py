"""Data parallelism of a compiled module: FSDP2 on its blocks and on the remaining parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.runtime.mesh_axes import SHARD_AXIS, DataAxes

_REPLICATE_OPTIONS = {"mp_policy", "offload_policy"}
_SHARD_OPTIONS = _REPLICATE_OPTIONS | {"reshard_after_forward", "shard_placement_fn"}
_STAGE_OPTIONS = {"mp_policy", "shard_placement_fn"}


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
    # An empty dict is no refusal.
    if fsdp is False or data.mesh is None:
        return None
    options = {} if isinstance(fsdp, bool) else dict(fsdp)
    allowed = _SHARD_OPTIONS if SHARD_AXIS in data.names else _REPLICATE_OPTIONS
    if unknown := sorted(map(str, options.keys() - allowed)):
        raise ArgumentError(
            f"fsdp has the options {', '.join(unknown)}; over {data.described()} it takes "
            f"{', '.join(sorted(allowed))}. For others pass fsdp=False and apply "
            "torch.distributed.fsdp.fully_shard to the module yourself"
        )
    policy = options.get("mp_policy")
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise ArgumentError(
            f"fsdp=dict(mp_policy={policy!r}): expected a "
            "torch.distributed.fsdp.MixedPrecisionPolicy, for example "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
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
            "options, or a mesh without these axes and reduce gradients between step() and the "
            "optimizer's"
        )
    options = fsdp if isinstance(fsdp, Mapping) else {}
    if unknown := sorted(map(str, options.keys() - _STAGE_OPTIONS)):
        raise ArgumentError(
            f"fsdp has the options {', '.join(unknown)}; a pipeline, which keeps the parameters of "
            "its stages gathered on the device from the first to the last microbatch of a step, "
            f"takes {', '.join(sorted(_STAGE_OPTIONS))}"
        )
    return checked_options(fsdp, data, world_size=1)


def refuse_scalars(model: nn.Module) -> None:
    """Raise an error for parameters that FSDP2 cannot shard, before the model is taken over.

    Raises:
        UnsupportedError: with the names of parameters without dimensions.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if names:
        raise UnsupportedError(
            f"parameters without dimensions ({', '.join(map(repr, names))}): FSDP2 shards the "
            "first one; make each a tensor of one element, nn.Parameter(value.reshape(1))"
        )


def apply_data_parallelism(
    root: nn.Module, compiled: CompiledProgram, data: DataAxes, options: Mapping[str, Any]
) -> None:
    """Apply ``fully_shard``, or ``replicate`` without an axis "dp_shard", to blocks and root.

    Args:
        root: the compiled module.
        compiled: the program whose blocks are wrapped.
        data: the axes.
        options: of ``fully_shard`` or ``replicate``.
    """
    assert data.mesh is not None
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    # Only what the user sees is cast: code between blocks was compiled for the types it has.
    inside = {
        **options,
        "mp_policy": replace(policy, output_dtype=None, cast_forward_inputs=False),
    }
    # The root last: FSDP2 manages there what no block before it has taken.
    apply: Any = fully_shard if SHARD_AXIS in data.names else replicate
    for path in _self_contained_blocks(root, compiled):
        apply(root.get_submodule(path), mesh=data.mesh, **inside)
    apply(root, mesh=data.mesh, **options)


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
        # Also those of a block inside another one, which are of both.
        shared = set().union(*(ids for other, ids in owners.items() if other != path))
        if owners[path] & shared:
            continue
        if all(users.get(names[key], {path}) == {path} for key in owners[path]):
            yield path
