"""A matmul and the collective before or after it, as one operator.

If ranks can access each other's memory (torch's symmetric memory, over NVLink), the matmul of one
rank's rows runs while those of the next are in flight: asynchronous tensor parallelism (Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition", ASPLOS). Anywhere else,
and on simulated and emulated ranks, the two run one after the other.

:mod:`sp_compiler.passes.async_tp` puts these operators into forwards.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import P, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Arguments, Collective, Operator, Typing, bytes_of, register


def all_gather_matmul(tp: Communicator, shard: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Gather the rows of all ranks' ``shard`` (n/t, k) and multiply them by each of ``factors``
    (k, m).

    Returns the gathered rows (n, k), and a product (n, m) per factor.
    """
    group = tp.symmetric_memory_group(shard)
    if group is None:
        gathered = tp.all_gather(shard, "S(0)", "R")
        return [gathered, *(torch.mm(gathered, factor) for factor in factors)]
    # They use streams and memory of the current device, which need not be that of the tensors.
    with torch.cuda.device_of(shard):
        gathered, products = _kernels().fused_all_gather_matmul(
            shard.contiguous(), list(factors), 0, group
        )
    return [gathered, *products]


def matmul_reduce_scatter(tp: Communicator, x: Tensor, factor: Tensor) -> Tensor:
    """Sum ``x @ factor`` over the ranks, for ``x`` (n, k/t) and ``factor`` (k/t, m); returns this
    rank's rows (n/t, m)."""
    group = tp.symmetric_memory_group(x)
    if group is None:
        return tp.reduce_scatter(torch.mm(x, factor), "P", "S(0)")
    with torch.cuda.device_of(x):
        summed: Tensor = _kernels().fused_matmul_reduce_scatter(x, factor, "sum", 0, group)
    return summed


def workspaces() -> list[Tensor]:
    """Return the memory through which the kernels have moved rows so far, one tensor per group.

    A call that needs more replaces the tensor by a larger one; whatever has recorded the kernels
    must keep the one that they use.
    """
    symmetric_memory = sys.modules.get("torch.distributed._symmetric_memory")
    if symmetric_memory is None:  # no kernel has run
        return []
    found = symmetric_memory._group_name_to_workspace_tensor.values()
    return [tensor for tensor in found if tensor is not None]


def _kernels() -> Any:
    """Torch's operators on symmetric memory."""
    # Importing this registers them; done here, so that only users of the kernels depend on it.
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def _fake_gathered(shard: Tensor, factors: Sequence[Tensor], world_size: int) -> list[Tensor]:
    rows = shard.shape[0] * world_size
    columns = (shard.shape[1], *(factor.shape[1] for factor in factors))
    return [shard.new_empty((rows, count)) for count in columns]


def _fake_scattered(x: Tensor, factor: Tensor, world_size: int) -> Tensor:
    return x.new_empty((x.shape[0] // world_size, factor.shape[1]))


def _type_gathered(args: Arguments, world_size: int) -> Sequence[Typing]:
    """A product is placed like its factor: replicated, or sharded by columns."""
    ways = itertools.product((R, S(1)), repeat=len(args["factors"]))
    return [((S(0), *columns), (R, *columns)) for columns in ways]


def _type_scattered(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((S(1), S(0)), (S(0),)), ((P, R), (S(0),)), ((R, P), (S(0),))]


def _gather(args: Arguments, results: Sequence[Tensor]) -> Sequence[Collective]:
    return [Collective("all_gather", 1, bytes_of(results[0]))]


def _scatter(args: Arguments, result: Tensor) -> Sequence[Collective]:
    return [Collective("reduce_scatter", 1, _product_bytes(args, result))]


def _product_bytes(args: Arguments, result: Tensor) -> int:
    return bytes_of(result) * args["world_size"]


ALL_GATHER_MATMUL = register(
    Operator(
        name="all_gather_matmul",
        schema="(Tensor shard, Tensor[] factors, SymInt world_size) -> Tensor[]",
        kernel=all_gather_matmul,
        fake=_fake_gathered,
        typings=_type_gathered,
        collectives=_gather,
        pipelined=True,
    )
)
MATMUL_REDUCE_SCATTER = register(
    Operator(
        name="matmul_reduce_scatter",
        schema="(Tensor x, Tensor factor, SymInt world_size) -> Tensor",
        kernel=matmul_reduce_scatter,
        fake=_fake_scattered,
        typings=_type_scattered,
        collectives=_scatter,
        # What a rank sends: the entire product of its own part.
        scratch_bytes=_product_bytes,
        pipelined=True,
    )
)
