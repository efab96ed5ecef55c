"""Tensors that a user passes to a compiled module and gets from it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Ref
from sp_compiler.module.parameters import tensor_spec
from sp_compiler.runtime.executor import Execution
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.padding import without_rank_padding

# The same in every call of a program; a bounded number, for a spec keeps its mesh.
_output_spec = functools.lru_cache(maxsize=64)(tensor_spec)


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
    sizes = torch.Size(placement.global_shape(tuple(value.shape), group.world_size))
    part = without_rank_padding(value, placement, group.rank, group.world_size)
    return _ShardedOutput.apply(part, _output_spec(group.mesh, sizes, value.dtype, placement))


class _ShardedOutput(torch.autograd.Function):
    """A rank's part of a global tensor as a DTensor: ``apply(part, spec)``.

    In place of ``DTensor.from_local``, whose checks take longer in every forward than a layer's
    matrix product does in a small one.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.placements = spec.placements
        ctx.set_materialize_grads(False)
        return DTensor.__new__(DTensor, part.detach(), spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, None]:
        # Whatever was done with the output, the region wants this rank's part.
        return None if grad is None else grad.redistribute(
            placements=ctx.placements
        ).to_local(), None
