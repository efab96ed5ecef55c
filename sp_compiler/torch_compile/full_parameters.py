"""Full parameters on every rank, of which a compiled program reads this rank's parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import Placement
from sp_compiler.base.shards import join_parts
from sp_compiler.ops.communicator import Communicator
from sp_compiler.runtime.parameter_gradients import opaque
from sp_compiler.runtime.region_call import forbid_double_backward

# Large enough for full bandwidth, small compared with the gradients themselves.
_BUCKET_BYTES = 64 << 20


def local_parameters(
    tp: Communicator, full: Mapping[str, Tensor], placements: Mapping[str, Placement]
) -> dict[str, Tensor]:
    """Return every parameter in the program's stored placement; every rank gets its full gradient.

    Args:
        tp: this rank's communicator.
        full: full parameters by name, equal on every rank.
        placements: stored placements by name, ``I`` or sharded.
    """
    local = dict(full)
    # The parameters themselves, so that autograd accumulates into them without a node in between.
    if tp.world_size == 1:
        return local
    sharded = [name for name in full if name in placements and placements[name].is_sharded]
    trained = [name for name in sharded if full[name].requires_grad]
    # Without an autograd node, since no gradients of frozen parameters are gathered.
    for name in sharded:
        if not full[name].requires_grad:
            local[name] = tp.part_of(full[name], placements[name])
    if trained:
        where = tuple(placements[name] for name in trained)
        parts = ShardParameters.apply(tp, where, *[full[name] for name in trained])
        local.update(zip(trained, parts, strict=True))
    return local


class ShardParameters(torch.autograd.Function):
    """I to S for many parameters: this rank's part; backward gathers their gradients.

    ``apply(tp, placements, *parameters)``. Parts are views of the full parameters, which stay in
    memory anyway; those of fused or padded parameters are copies.
    """

    @staticmethod
    def forward(
        ctx: Any, tp: Communicator, placements: tuple[Placement, ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.placements = tp, placements
        # The gradient of a parameter that a call does not use stays ``None``, as in eager mode.
        ctx.set_materialize_grads(False)
        return tuple(
            tp.part_of(parameter.detach(), placement)
            for parameter, placement in zip(parameters, placements, strict=True)
        )

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            full = gather_gradients(ctx.tp, grads, ctx.placements)
        return (None, None, *forbid_double_backward(full, grads))


def gather_gradients(
    tp: Communicator,
    grads: Sequence[Tensor | None],
    placements: Sequence[Placement],
    bucket_bytes: int = _BUCKET_BYTES,
) -> list[Tensor | None]:
    """Return full gradients from all ranks' parts, with one all-gather per bucket of one dtype."""
    result: list[Tensor | None] = [None] * len(grads)
    for bucket in _buckets(grads, bucket_bytes):
        # One collective for many parameters, instead of a latency for each.
        flat = torch.cat([grad.reshape(-1) for _, grad in bucket])
        ranks = tp.all_gather(flat, "S(0)", "I").view(tp.world_size, -1)
        sizes = [grad.numel() for _, grad in bucket]
        for (index, grad), pieces in zip(bucket, ranks.split(sizes, dim=1), strict=True):
            parts = [piece.view(grad.shape) for piece in pieces]
            result[index] = join_parts(parts, placements[index])
    return result


def _buckets(
    grads: Sequence[Tensor | None], bucket_bytes: int
) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield positions and gradients of one dtype, of at most ``bucket_bytes`` or a single one."""
    by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for index, grad in enumerate(grads):
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).append((index, grad))
    for members in by_dtype.values():
        bucket: list[tuple[int, Tensor]] = []
        filled = 0
        for index, grad in members:
            if bucket and filled + grad.nbytes > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append((index, grad))
            filled += grad.nbytes
        yield bucket
