"""Comparison of which parameters have gradients, between the ranks over which FSDP2 sums them.

FSDP2 concatenates the gradients that it finds in a block, and sums them over the ranks. If a model
takes different paths on different parts of the data (a branch without images), it sums gradients of
different parameters, silently if they have the same number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from sp_compiler.base.errors import RankMismatchError

_BITS = 62
_GROUPS = ("shard_process_group", "replicate_process_group")


class SameGradients:
    """Raises an error at the end of a backward that reduced different gradients on some ranks.

    Only in groups whose waits are watched (:mod:`sp_compiler.grid.watched_group`): on accelerators
    the host does not wait for the data of other ranks.

    Args:
        param_groups: function that returns the FSDP parameter groups, the same on all ranks.
    """

    def __init__(self, param_groups: Callable[[], Iterable[Any]]) -> None:
        self._param_groups = param_groups
        self._taken: set[int] = set()
        self._backward = -1

    def add(self, record: Any) -> None:
        """Note that FSDP reduces a gradient of the parameter of ``record`` now."""
        backward = torch._C._current_graph_task_id()
        # Outside of a backward (-1), the caller of the reduction calls ``compare``.
        if backward != self._backward:
            self._taken, self._backward = set(), backward
            Variable._execution_engine.queue_callback(self.compare)
        self._taken.add(id(record))

    def compare(self) -> None:
        """Compare the gradients that were reduced since the last call.

        Raises:
            RankMismatchError: another rank has reduced gradients of different parameters.
        """
        taken, self._taken, self._backward = self._taken, set(), -1
        # If a rank reduces nothing, or has failed, the others wait in their own collectives.
        if not taken:
            return
        groups = list(self._param_groups())
        records = [record for group in groups for record in group.fsdp_params]
        own = _packed([id(record) in taken for record in records])
        infos = [(group.mesh_info, name) for group in groups for name in _GROUPS]
        found: dict[Any, None] = {getattr(info, name, None): None for info, name in infos}
        for group in found:
            if not hasattr(group, "gather_numbers"):  # torch's own
                continue
            ranks = group.gather_numbers(own, "waits for the other parts of the data")()
            for rank, row in enumerate(ranks):
                if row != own:
                    raise _mismatch(records, taken, rank, row)


def _packed(flags: Sequence[bool]) -> list[int]:
    starts = range(0, len(flags), _BITS)
    return [
        sum(flag << bit for bit, flag in enumerate(flags[start : start + _BITS]))
        for start in starts
    ]


def _mismatch(records: list[Any], taken: set[int], rank: int, row: list[int]) -> RankMismatchError:
    differing = [
        (record._param_fqn, id(record) in taken)
        for index, record in enumerate(records)
        if (id(record) in taken) != bool(row[index // _BITS] >> index % _BITS & 1)
    ]
    name, is_here = differing[0]
    others = f" ({len(differing)} parameters in all)" if len(differing) > 1 else ""
    here, there = ("a", "none") if is_here else ("no", "one")
    return RankMismatchError(
        f"{name} has {here} gradient on this rank and {there} on rank {rank} of the same data "
        f"axis{others}, so FSDP2 has mixed gradients of different parameters: all parts of the "
        "data must take the same path through the model; if a part of the model has no input, "
        "pass it a dummy input (zeros, with weight 0 in the loss)"
    )
