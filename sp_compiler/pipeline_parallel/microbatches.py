"""A batch split into microbatches, and its outputs joined from theirs.

Only the last stage has outputs. The other ranks get the same object with the loss alone::

    rank of the last stage    CausalLMOutput(loss=tensor(2.1), logits=(8, 128, 512))
    any other rank            CausalLMOutput(loss=tensor(2.1), logits=None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Ref
from sp_compiler.module.outputs import user_output
from sp_compiler.pipeline_parallel.stage_program import loss_of, returned_refs
from sp_compiler.runtime.group import TensorParallelGroup


def check_weigh(weigh: Any) -> None:
    """Raise :class:`ArgumentError` unless ``weigh`` can be called, or is ``None``."""
    if weigh is not None and not callable(weigh):
        raise ArgumentError(
            f"weigh={weigh!r}: expected a function of a microbatch's inputs that returns its "
            "weight, or None"
        )


def rows_of(leaves: Sequence[Any]) -> int:
    """Return the batch size of flattened inputs: the first dim of the first tensor."""
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())


def microbatches_of(leaves: Sequence[Any], names: Sequence[str], count: int) -> list[list[Any]]:
    """Split the flattened inputs of a batch into ``count`` equal parts along the first dim.

    The batch is the first dim of the first tensor. Tensors with another first dim (one row of
    position ids), and other leaves, belong to every microbatch.

    Args:
        leaves: leaves from :func:`sp_compiler.trace.export.flatten_inputs`.
        names: names of the leaves, for messages.
        count: number of microbatches.

    Raises:
        ArgumentError: no tensor, or a batch that ``count`` does not divide.
        UnsupportedError: an input requires a gradient.
    """
    sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
    batch = next((size for size in sizes if size is not None), None)
    if batch is None:
        raise ArgumentError("no input is a tensor with a batch dim, which microbatches are cut of")
    # Not padded: rows that are none would count in a mean over tokens.
    if batch % count or not batch:
        first = names[sizes.index(batch)]
        raise ArgumentError(
            f"{first} has a batch of {batch}, which microbatches={count} does not divide: pass a "
            f"multiple of {count}, or another number of microbatches to sp_compiler.pipeline"
        )
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise UnsupportedError(
                f"{name} requires a gradient, which a pipeline does not compute for inputs; detach "
                "it, or compute it inside the model"
            )
    pieces = [
        # Views: a step holds its batch once.
        leaf.split(batch // count) if size == batch else (leaf,) * count
        for leaf, size in zip(leaves, sizes, strict=True)
    ]
    return [[piece[number] for piece in pieces] for number in range(count)]


def joined_outputs(
    compiled: CompiledProgram,
    group: TensorParallelGroup,
    outputs: Mapping[int, Sequence[Tensor]],
    weights: Sequence[Tensor | float],
    rows: int,
) -> Mapping[Ref, Tensor]:
    """Return the outputs of a batch by their source; empty where no microbatch has outputs.

    Args:
        compiled: the program of one microbatch.
        group: ranks of "tp".
        outputs: by microbatch, the values of :func:`returned_refs`; on the last stage.
        weights: weight of each microbatch.
        rows: batch size of a microbatch.

    Raises:
        UnsupportedError: an output whose first dim is not the batch's.
    """
    if not outputs:
        return {}
    result: dict[Ref, Tensor] = {}
    for position, ref in enumerate(returned_refs(compiled.program)):
        parts = [
            user_output(outputs[number][position], compiled.placement(ref), group)
            for number in range(len(outputs))
        ]
        result[ref] = joined(parts, weights, rows)
    return result


def joined(parts: Sequence[Tensor], weights: Sequence[Tensor | float], rows: int) -> Tensor:
    """Return one output of a batch, from those of its microbatches; see :func:`joined_outputs`."""
    first = parts[0]
    if first.dim() == 0:
        # Such as the loss of a router. The mean over no tokens is NaN, and weighs nothing.
        factors = [torch.as_tensor(weight, device=first.device) for weight in weights]
        terms = zip(factors, parts, strict=True)
        return torch.stack([torch.where(w == 0, 0.0, w * part) for w, part in terms]).sum()
    if first.shape[0] % rows:
        raise UnsupportedError(
            f"the model returns a tensor of shape {tuple(first.shape)} for a microbatch of {rows} "
            "rows, which has no batch as its first dim: the pipeline cannot join those of several "
            "microbatches; return a tensor whose first dim is the batch, or none"
        )
    return torch.cat(list(parts))


def user_outputs(compiled: CompiledProgram, loss: Tensor, joined: Mapping[Ref, Tensor]) -> Any:
    """Return the model's own output type with the loss, and the ``joined`` values of the others.

    Tensors that are not in ``joined`` are ``None``.
    """
    program = compiled.program
    own_loss = loss_of(program)
    leaves = [
        (loss if leaf == own_loss else joined.get(leaf)) if isinstance(leaf, Ref) else leaf
        for leaf in program.outputs[: program.out_spec.num_leaves]
    ]
    return pytree.tree_unflatten(leaves, program.out_spec)
