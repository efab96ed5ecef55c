"""Input and output tensors of a compiled module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.base.stored_attributes import Result
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Ref
from sp_compiler.module.parameters import tensor_spec
from sp_compiler.runtime.executor import Execution
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.padding import without_rank_padding
from sp_compiler.runtime.parameter_gradients import CompiledFunction, opaque

# Specs are the same in every call of a program. The cache is bounded, since a spec keeps its mesh.
_output_spec = functools.lru_cache(maxsize=64)(tensor_spec)


def plain_input(leaf: Any) -> Any:
    """Return a user input as a plain tensor.

    Raises:
        ArgumentError: a DTensor that is not replicated.
    """
    if not isinstance(leaf, DTensor):
        return leaf
    if any(not placement.is_replicate() for placement in leaf.placements):
        raise ArgumentError(
            f"an input is a DTensor placed {leaf.placements}; inputs must be full on every rank "
            "(plain tensors, or replicated DTensors)"
        )
    return leaf.to_local()


def user_outputs(
    compiled: CompiledProgram,
    run: Execution,
    group: TensorParallelGroup,
    modules: Mapping[str, nn.Module],
) -> Any:
    """Return the model's own output type; tensors that stay sharded are :class:`ShardedOutput`.

    Values that the forward stores in attributes are stored in those of ``modules``, by path.
    """
    program = compiled.program
    leaves = [
        user_output(value, compiled.placement(ref), group) if isinstance(ref, Ref) else value
        for value, ref in zip(run.outputs, program.outputs, strict=True)
    ]
    num_returned = program.out_spec.num_leaves
    for stored in program.stored:
        module = modules[stored.path]
        before = None if stored.how in ("set", "decide") else getattr(module, stored.name)
        value = stored.after(before, leaves[num_returned:])
        if stored.how == "decide":
            setattr(module, stored.name, value)
            continue
        # Not by setattr, which makes an attribute part of the key of every call. Tensors are not
        # stored in the original, where the next capture would find them.
        has_tensors = any(isinstance(leaf, Result) for leaf in stored.leaves)
        vars(module if has_tensors else module._sp_original)[stored.name] = value
    return pytree.tree_unflatten(leaves[:num_returned], program.out_spec)


def user_output(value: Any, placement: Placement, group: TensorParallelGroup) -> Any:
    """Return one output of a program for the user; :class:`ShardedOutput` if it stays sharded."""
    if isinstance(value, DTensor):  # the model returns a parameter
        return value if placement.is_sharded else value.to_local()
    if group.mesh is None or not placement.is_sharded:
        return value
    sizes = torch.Size(placement.global_shape(tuple(value.shape), group.world_size))
    part = without_rank_padding(value, placement, group.rank, group.world_size)
    return _ToOutput.apply(part, _output_spec(group.mesh, sizes, value.dtype, placement))


class ShardedOutput(DTensor):
    """A sharded output, which mixes with plain tensors.

    PyTorch's DTensor does not mix with plain tensors. Here a plain tensor means, as for inputs of
    the module, the same full tensor on every rank::

        logits                    (2, 8, 512)  Shard(2)   ShardedOutput
        logits[:, :-1]            (2, 7, 512)  Shard(2)   ShardedOutput
        logits.argmax(-1)         (2, 8)       plain, full on every rank
        logits.argmax(-1) == ids  (2, 8)       plain
        logits.topk(5)            (2, 8, 5)    plain

    A result that is not sharded is a plain tensor, with partial sums reduced immediately, so it can
    be printed, compared, and passed to any library. Operations that DTensor cannot run on parts run
    on the full tensor. An operation may therefore be a collective, and all ranks must run it.

    Raises:
        UnsupportedError: an in-place operation that DTensor does not support; pickling.
    """

    # Without own attributes, so that results of DTensor's operators can be given this class.
    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "an output that is sharded over the tensor-parallel ranks cannot be pickled "
            "(torch.save): the file would have only this rank's part. Save output.full_tensor(), "
            "which all ranks must call"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        mesh = next(leaf.device_mesh for leaf in leaves if isinstance(leaf, ShardedOutput))
        given = [_replicated(leaf, mesh) for leaf in leaves]
        given_args, given_kwargs = pytree.tree_unflatten(given, structure)
        name = getattr(func, "__name__", str(func))
        try:
            # Otherwise DTensor could redistribute to other dims (by an all-to-all, which gloo
            # lacks), and the result could stay sharded over the batch: neither on the output's dim
            # nor plain. The placement of a tensor written in place does not change.
            with ExplicitRedistributionContext(not _mutates(name, kwargs or {})):
                result = super().__torch_function__(func, types, given_args, given_kwargs)
        except torch.OutOfMemoryError:
            raise  # only on this rank: a collective would wait for the other ranks
        except (NotImplementedError, RuntimeError, TypeError) as error:
            # A reshape that splits a sharded dim, an operator that has no rule or needs entire
            # rows, numpy(), or a user's mistake. It is the same on every rank; a mistake raises
            # again on full tensors.
            if _mutates(name, kwargs or {}):
                raise UnsupportedError(
                    f"{name} of an output that is sharded over the tensor-parallel ranks: {error}\n"
                    "  what to do: change output.full_tensor(), which all ranks must call, or "
                    'compile(..., outputs="replicate")'
                ) from error
            full = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
            full_args, full_kwargs = pytree.tree_unflatten(full, structure)
            return func(*full_args, **full_kwargs)
        # A tree of sizes is mapped to a tuple, which has no numel().
        is_size = isinstance(result, torch.Size)
        return result if is_size else pytree.tree_map_only(DTensor, _result, result)


def _mutates(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a torch function changes its arguments, judged by its name and arguments."""
    in_place = name.endswith("_") and not name.endswith("__")
    # __iadd__ and so on; the three excluded methods begin in the same way but only read.
    augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    setter = name in ("__setitem__", "__set__")
    return (
        in_place
        or augmented
        or setter
        or bool(kwargs.get("inplace"))
        or kwargs.get("out") is not None
    )


def _replicated(leaf: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    # Its gradient is summed over the ranks, each of which has the gradient from its part of the
    # output.
    return DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _result(value: DTensor) -> Tensor:
    if any(placement.is_shard() for placement in value.placements):
        # In place, since it may be a view: a new object would leave the autograd graph, or add a
        # node to it.
        if type(value) is DTensor:
            value.__class__ = ShardedOutput
        return value
    return value.full_tensor()


class _ToOutput(CompiledFunction):
    """A rank's part of a global tensor as a :class:`ShardedOutput`: ``apply(part, spec)``.

    It replaces ``DTensor.from_local``, whose checks in every forward take longer than a matmul of a
    small layer.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.placements = spec.placements
        ctx.set_materialize_grads(False)
        return DTensor.__new__(ShardedOutput, part.detach(), spec, requires_grad=False)

    @staticmethod
    @opaque
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, None]:
        # Whatever the placement of the gradient, the region needs this rank's part.
        return None if grad is None else grad.redistribute(
            placements=ctx.placements
        ).to_local(), None
