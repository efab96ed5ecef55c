"""A batch split into microbatches, and its outputs joined from theirs.

Only the last stage has outputs. The other ranks get the same object with only the loss::

    rank of the last stage    CausalLMOutput(loss=tensor(2.1), logits=(8, 128, 512))
    any other rank            CausalLMOutput(loss=tensor(2.1), logits=None)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Program, Ref
from sp_compiler.module.outputs import user_output
from sp_compiler.pipeline_parallel.stage_program import loss_of, returned_refs
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.trace.arguments import bound_call


def check_weigh(weigh: Any) -> None:
    """Raise :class:`ArgumentError` unless ``weigh`` can be called, or is ``None``."""
    if weigh is not None and not callable(weigh):
        raise ArgumentError(
            f"weigh={weigh!r}: expected a function of a microbatch's inputs that returns its "
            "weight, or None"
        )


def batch_size(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the first dim of the first tensor of a call, in the order of forward's parameters.

    Flattened inputs have another order: keyword arguments are sorted by name there.

    Raises:
        ArgumentError: there is no tensor, or ``forward`` does not take these arguments.
    """
    arguments = bound_call(forward, args, kwargs, "the batch").arguments
    leaves = pytree.tree_leaves(list(arguments.values()))
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    size = next(sizes, None)
    if size is None:
        raise ArgumentError(
            "no input is a tensor with a batch dim, to be cut into microbatches: pass the batch as "
            "dim 0 of an input"
        )
    return int(size)


def microbatches_of(
    leaves: Sequence[Any], names: Callable[[], Sequence[str]], batch: int, count: int
) -> list[list[Any]]:
    """Split the flattened inputs of a batch into ``count`` equal parts along the first dim.

    Tensors with another first dim than ``batch`` (one row of position ids), and other leaves,
    belong to every microbatch.

    Args:
        leaves: leaves from :func:`sp_compiler.trace.export.flatten_inputs`.
        names: returns the names of the leaves; called only for an error.
        batch: see :func:`batch_size`.
        count: number of microbatches.

    Raises:
        ArgumentError: ``count`` does not divide the batch.
        UnsupportedError: an input requires a gradient.
    """
    sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
    # Not padded: padding rows would count in a mean over tokens.
    if batch % count or not batch:
        first = names()[sizes.index(batch)]
        raise ArgumentError(
            f"{first} has a batch of {batch}, which microbatches={count} does not divide: pass a "
            f"multiple of {count}, or another number of microbatches to sp_compiler.pipeline"
        )
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise UnsupportedError(
                f"{names()[position]} requires a gradient, which a pipeline does not compute for "
                "inputs; detach it, or compute it inside the model"
            )
    pieces = [
        # Views, so that a step holds its batch only once.
        leaf.split(batch // count) if size == batch else (leaf,) * count
        for leaf, size in zip(leaves, sizes, strict=True)
    ]
    return [[piece[number] for piece in pieces] for number in range(count)]


def require_one_way(
    program: Program, parts: Sequence[Sequence[Any]], buffers: Mapping[str, Tensor]
) -> None:
    """Raise an error unless the forward of each microbatch reads the values that ``program`` was
    compiled for.

    Args:
        program: program of the first microbatch; the others run it too.
        parts: flattened inputs of the other microbatches.
        buffers: name to buffer.

    Raises:
        UnsupportedError: a value differs; the message names its line.
    """
    for number, leaves in enumerate(parts, start=1):
        # In order: after the first that differs, the forward takes another path.
        for each in program.decisions:
            if (value := repr(each.read(leaves, buffers))) != each.value:
                raise UnsupportedError(
                    f"the forward reads from its inputs {each} for microbatch 0 and "
                    f"{value} for microbatch {number}, and the microbatches of a step run one "
                    "program: compute what depends on it with tensors (torch.where), pad the "
                    "batch so that the number is the same, or pass it as an argument"
                )


def joined_outputs(
    compiled: CompiledProgram,
    group: TensorParallelGroup,
    outputs: Mapping[int, Sequence[Tensor]],
    weights: Sequence[Tensor | float],
    inputs: Sequence[Sequence[Any]],
    rows: int,
) -> Mapping[Ref, Tensor]:
    """Return the outputs of a batch by their source; empty where no microbatch has outputs.

    A parameter, or an input that belongs to every microbatch, is returned as is.

    Args:
        compiled: the program of one microbatch.
        group: ranks of "tp".
        outputs: by microbatch, the values of :func:`returned_refs`; on the last stage.
        weights: weight of each microbatch.
        inputs: flattened inputs of each microbatch.
        rows: number of rows of each microbatch.

    Raises:
        UnsupportedError: see :func:`joined`.
    """
    if not outputs:
        return {}
    lengths = batch_lengths(inputs[0], rows)
    result: dict[Ref, Tensor] = {}
    for position, ref in enumerate(returned_refs(compiled.program)):
        parts = [
            user_output(outputs[number][position], compiled.placement(ref), group)
            for number in range(len(outputs))
        ]
        shared = ref.kind in ("param", "buffer", "constant") or (
            ref.kind == "input" and all(part[ref.index] is inputs[0][ref.index] for part in inputs)
        )
        result[ref] = parts[-1] if shared else joined(parts, weights, lengths)
    return result


def batch_lengths(leaves: Sequence[Any], rows: int) -> list[int]:
    """Return the lengths that a dim over the batch may have, for the flattened inputs of a
    microbatch: its number of rows first, then that of its tokens, which is the rows times the
    second dim of an input."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1]
    return [rows, *sorted({rows * leaf.shape[1] for leaf in tensors if leaf.shape[0] == rows})]


def joined(
    parts: Sequence[Tensor], weights: Sequence[Tensor | float], lengths: Sequence[int]
) -> Tensor:
    """Return one output of a batch, from those of its microbatches.

    Args:
        parts: those of the microbatches, in order.
        weights: weight of each microbatch.
        lengths: see :func:`batch_lengths`.

    Raises:
        UnsupportedError: there are several microbatches, and the first dim of the output is not the
            batch's, or the output is an integer scalar, which may be meant to be summed.
    """
    first = parts[0]
    if first.dim() == 0 and (first.is_floating_point() or first.is_complex()):
        # Such as the loss of a router. The mean over no tokens is NaN, with weight 0.
        wide = torch.promote_types(first.dtype, torch.float64)
        factors = [torch.as_tensor(w, dtype=torch.float64, device=first.device) for w in weights]
        terms = [
            torch.where(factor == 0, 0.0, factor * part.to(wide))
            for factor, part in zip(factors, parts, strict=True)
        ]
        return torch.stack(terms).sum().to(first.dtype)
    if len(parts) == 1:
        return first
    # Not any multiple of the rows: that may be layers, experts or positions.
    if first.dim() == 0 or first.shape[0] not in lengths:
        what = "is not a mean" if first.dim() == 0 else "does not have the batch as its first dim"
        raise UnsupportedError(
            f"the model returns a tensor of shape {tuple(first.shape)} and {first.dtype} for a "
            f"microbatch of {lengths[0]} rows, which {what}: the pipeline cannot join those of "
            "several microbatches; return a tensor whose first dim is the batch, or no tensor, or "
            "use eval_loss(...)"
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
