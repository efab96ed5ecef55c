"""Dropout whose mask is a pure function of the seed and the position of an element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.counter import Grid, block_shape, is_plain, scratch_bytes
from sp_compiler.ops.registry import Arguments, Gradient, Operator, Typing, register

_sp = torch.ops.sp_compiler


@torch.no_grad()
def dropout_mask(  # noqa: PLR0913 - those of the operator
    tp: Communicator,
    x: Tensor,
    seed: Tensor,
    p: float,
    site: int,
    dim: int,
    world_size: int,
    first_row: int = 0,
    padding: int = 0,
    first_query: int = 0,
    num_queries: int = 0,
) -> Tensor:
    """Bool mask, shaped and laid out like ``x``: True where the element survives.

    Args:
        tp: communicator of this rank.
        x: one rank's part of a tensor that is sharded on ``dim`` over ``world_size`` ranks; if that
            is 1, the tensor is replicated, and every rank drops the same elements.
        seed: 0-dim int64.
        p: probability of dropping an element, in [0, 1), accurate to 2^-32.
        site: number of this dropout among those that share ``seed``.
        dim: the sharded dimension; ignored if ``world_size`` is 1.
        first_row: rows, of all dims but the last, before those of ``x`` in the tensor that the mask
            belongs to, if that is processed in pieces.
        padding: elements of ``dim`` over all ranks that the tensor does not have, after the others
            (heads, if their number is not divisible).
        first_query: first row of dim -2 in ``x``, if that is a chunk of such rows (queries of
            attention); ``dim`` is another one then.
        num_queries: rows of dim -2 in all chunks together; 0 if ``x`` is not a chunk.

    Raises:
        ArgumentError: ``p`` is outside [0, 1).
    """
    mask = torch.empty_like(x, dtype=torch.bool)
    place = site, dim, world_size, tp.rank, first_row, padding, first_query, num_queries
    threshold = threshold_of(p)
    if not is_plain(tp.rank, x, seed):
        grid = Grid(x.shape, x.device, seed, *place)
        return mask.copy_((grid.hash_all() >= threshold).view(x.shape))
    target = (
        mask if mask.is_contiguous() else torch.empty(x.shape, dtype=torch.bool, device=x.device)
    )
    if x.is_cuda and (on_gpu := _gpu_kernel()):
        on_gpu(target, target, seed, threshold, 1.0, *place)
    else:
        grid = Grid(x.shape, x.device, seed, *place)
        flat = target.view(grid.shape)
        for block, bits in grid.blocks():
            torch.ge(bits, threshold, out=flat[block])
    return mask if target is mask else mask.copy_(target)


@torch.no_grad()
def dropout(  # noqa: PLR0913 - those of the operator
    tp: Communicator,
    x: Tensor,
    seed: Tensor,
    p: float,
    site: int,
    dim: int,
    world_size: int,
    first_row: int = 0,
    padding: int = 0,
    first_query: int = 0,
    num_queries: int = 0,
) -> Tensor:
    """Return ``x * dropout_mask(x, ...) * (1 / (1 - p))``, bit for bit, without a mask in memory.

    Arguments as for :func:`dropout_mask`. It is linear in ``x`` and its own gradient.
    """
    result = torch.empty_like(x)
    place = site, dim, world_size, tp.rank, first_row, padding, first_query, num_queries
    threshold, scale = threshold_of(p), 1 / (1 - p)
    if not is_plain(tp.rank, x, seed):
        grid = Grid(x.shape, x.device, seed, *place)
        survives = (grid.hash_all() >= threshold).view(x.shape)
        return result.copy_((x * survives).mul_(scale))
    source = x.contiguous()
    target = result if result.is_contiguous() else torch.empty_like(source)
    if x.is_cuda and (on_gpu := _gpu_kernel()):
        on_gpu(source, target, seed, threshold, scale, *place)
    else:
        grid = Grid(x.shape, x.device, seed, *place)
        source_rows, target_rows = source.view(grid.shape), target.view(grid.shape)
        for block, bits in grid.blocks():
            survives = bits.ge_(threshold)
            torch.mul(source_rows[block], survives.to(x.dtype), out=target_rows[block]).mul_(scale)
    return result if target is result else result.copy_(target)


@cache
def _gpu_kernel() -> Callable[..., None] | None:
    """Return the Triton kernel; ``None`` without Triton, part of PyTorch for GPUs on Linux."""
    if find_spec("triton") is None:
        return None
    from sp_compiler.ops.gpu.dropout import run_dropout

    return run_dropout


def threshold_of(p: float) -> int:
    """Return the smallest int32 that survives: a fraction ``p`` of the 2^32 values is below it."""
    if not 0 <= p < 1:
        raise ArgumentError(f"dropout p={p!r}: expected a probability in [0, 1)")
    # The hash is signed, so the least number is -2^31; and some value has to survive even if p
    # is rounded to 1.
    return min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


# What graphs need to know about them.


def _fake_mask(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _fake_like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _save_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    # The seed reproduces the mask: nothing else is saved.
    return _sp.dropout(grad, seed, *ctx.rest), None, *(None for _ in ctx.rest)


def _type_dropout(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Linear, so partial sums pass through; a shard needs its position in the global tensor."""
    return _typings(args, world_size, P)


def _type_mask(args: Arguments, world_size: int) -> Sequence[Typing]:
    """The mask of a partial sum is that of the sum: it does not depend on the values of ``x``."""
    return _typings(args, world_size, R)


def _typings(args: Arguments, world_size: int, of_partial: Placement) -> Sequence[Typing]:
    typings: list[Typing] = []
    if args["world_size"] == 1:
        # Every rank drops the same elements of its summand: dropout of the sum.
        typings += [((R, R), (R,)), ((P, R), (of_partial,))]
    if args["world_size"] == world_size:
        shard = S(args["dim"] % max(1, args["x"].meta["val"].dim()))
        typings.append(((shard, R), (shard,)))
    return typings


def _scratch_of_dropout(args: Arguments, result: Tensor) -> int:
    x = args["x"].meta["val"]
    survives = 0 if x.is_cuda else x.element_size() * prod(block_shape(x.shape, x.device))
    straightened = sum(each.nbytes for each in (x, result) if not each.is_contiguous())
    return _scratch(x) + survives + straightened


def _scratch_of_mask(args: Arguments, result: Tensor) -> int:
    x = args["x"].meta["val"]
    return _scratch(x) + (0 if result.is_contiguous() else result.nbytes)


def _scratch(x: Tensor) -> int:
    # The kernel needs none, and is available wherever a large model is trained.
    return 0 if x.is_cuda else scratch_bytes(x.shape, x.device)


_SCHEMA = (
    "(Tensor x, Tensor seed, float p, SymInt site, SymInt dim, SymInt world_size, "
    "SymInt first_row=0, SymInt padding=0, SymInt first_query=0, SymInt num_queries=0) -> Tensor"
)
DROPOUT_MASK = register(
    Operator(
        name="dropout_mask",
        schema=_SCHEMA,
        kernel=dropout_mask,
        fake=_fake_mask,
        typings=_type_mask,
        placed=True,
        scratch_bytes=_scratch_of_mask,
    )
)
DROPOUT = register(
    Operator(
        name="dropout",
        schema=_SCHEMA,
        kernel=dropout,
        fake=_fake_like,
        typings=_type_dropout,
        gradient=Gradient(_save_seed, _backward),
        placed=True,
        scratch_bytes=_scratch_of_dropout,
    )
)
