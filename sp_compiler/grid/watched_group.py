"""Collectives that torch runs for FSDP2 and for gradient norms, with waits that check whether
another rank has failed.

FSDP2 uses the process groups of its mesh, and waits in them until their timeout. A
:class:`WatchedGroup` replaces such a group, and waits like our own collectives::

    FSDP2 ──> torch.distributed.all_gather_single(..., group) ──> work.wait()
                                                     WatchedGroup     look ── look ── raise: rank 1
                                                                      failed: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sp_compiler.runtime.failures.boards import board_of, report_everywhere
from sp_compiler.runtime.watched_collectives import WatchedCollectives, is_gloo

_NAMES_BEFORE_2_13 = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
}


def watch(group: Any) -> None:
    """Watch the collectives of an FSDP group of parameters."""
    info = group.mesh_info
    for name in ("shard_process_group", "replicate_process_group"):
        if hasattr(info, name):
            setattr(info, name, watched(getattr(info, name)))


def watched(process_group: dist.ProcessGroup | WatchedGroup) -> Any:
    """Return what to pass to torch.distributed's functions in place of ``process_group``.

    On accelerators, where the host does not wait, and if its ranks have no board: the group itself.
    """
    if isinstance(process_group, WatchedGroup):
        return process_group
    board = board_of(process_group)
    if board is None or not is_gloo(process_group):
        return process_group
    return WatchedGroup(process_group, WatchedCollectives(process_group, board, board.timeout))


class WatchedGroup:
    """A process group whose collectives of gradients and parameters are watched.

    Args:
        process_group: a gloo group, which handles everything else.
        collectives: of the same group.
    """

    def __init__(self, process_group: dist.ProcessGroup, collectives: WatchedCollectives) -> None:
        self._process_group = process_group
        self._collectives = collectives

    def __getattr__(self, name: str) -> Any:
        own = _NAMES_BEFORE_2_13.get(name)
        return getattr(self, own) if own else getattr(self._process_group, name)

    # torch looks up properties of a group in dictionaries.

    def __hash__(self) -> int:
        return hash(self._process_group)

    def __eq__(self, other: object) -> bool:
        return self._process_group == getattr(other, "_process_group", other)

    def meet(self) -> None:
        """Wait for all ranks, and raise an error if one of them has failed."""
        self.gather_numbers([0], "waits for the other parts of the data")()

    def gather_numbers(self, numbers: list[int], purpose: str) -> Callable[[], list[list[int]]]:
        """Start to gather a few integers of every rank; returns a function that waits for them."""
        return self._collectives.gather_numbers(numbers, purpose)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any) -> dist.Work:
        """Gather ``own`` of every rank into ``output``."""
        if not own.is_cpu:
            return self._process_group._allgather_base(output, own, options)
        self._collectives.begin()
        work = self._process_group._allgather_base(output, own, options)
        purpose = "waits for parameters of FSDP2"
        return _WatchedWork(self._collectives.arrival(work, output, purpose))

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, options: Any) -> dist.Work:
        """Reduce ``parts`` over the ranks; ``output`` gets this rank's part."""
        if not parts.is_cpu:
            return self._process_group._reduce_scatter_base(output, parts, options)
        purpose = "waits for gradients of FSDP2"
        arrive = self._collectives.reduce_scatter(parts, self.size(), options.reduceOp, purpose)
        return _WatchedWork(lambda: output.copy_(arrive()))

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        """Reduce the one tensor in ``tensors`` over the ranks, in place."""
        if not tensors[0].is_cpu:
            return self._process_group.allreduce(tensors, options)
        self._collectives.begin()
        work = self._process_group.allreduce(tensors, options)
        purpose = "waits for sums of gradients"
        return _WatchedWork(self._collectives.arrival(work, tensors[0], purpose))


class _WatchedWork(dist.Work):
    def __init__(self, arrive: Callable[[], Tensor]) -> None:
        super().__init__()
        self._arrive = arrive

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the result, at most as long as ranks wait for each other."""
        try:
            self._arrive()
        except Exception as error:
            # Torch's code around it, in hooks and norms, does not inform other ranks.
            report_everywhere(error)
            raise
        return True
