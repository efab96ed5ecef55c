"""Tensors that a user passes to a compiled module and gets from it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Ref
from sp_compiler.module.parameters import mesh_placement
from sp_compiler.runtime.executor import Execution
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.padding import without_rank_padding


def plain_input(leaf: Any) -> Any:
    """A user input as a plain tensor.

    Raises:
        ArgumentError: it is a DTensor of which this rank has a part only.
    """
    if not isinstance(leaf, DTensor):
        return leaf
    if any(not placement.is_replicate() for placement in leaf.placements):
        raise ArgumentError(
            f"an input is a DTensor placed {leaf.placements}; inputs must be whole on every rank "
            "(plain tensors, or replicated DTensors)"
        )
    return leaf.to_local()


def user_outputs(compiled: CompiledProgram, run: Execution, group: TensorParallelGroup) -> Any:
    """The model's own output type; tensors that stay sharded are DTensors."""
    leaves = [
        _output(value, compiled.placement(ref), group) if isinstance(ref, Ref) else value
        for value, ref in zip(run.outputs, compiled.program.outputs, strict=True)
    ]
    return pytree.tree_unflatten(leaves, compiled.program.out_spec)


def _output(value: Any, placement: Placement, group: TensorParallelGroup) -> Any:
    if isinstance(value, DTensor):  # the model returns a parameter
        return value if placement.is_sharded else value.to_local()
    if group.mesh is None or not placement.is_sharded:
        return value
    sizes = placement.global_shape(tuple(value.shape), group.world_size)
    # The strides of the global tensor are those of a contiguous one, whatever the part's are.
    described = torch.empty(sizes, device="meta")
    return DTensor.from_local(
        without_rank_padding(value, placement, group.rank, group.world_size),
        group.mesh,
        [mesh_placement(placement)],
        run_check=False,
        shape=described.shape,
        stride=described.stride(),
    )
