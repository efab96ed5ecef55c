"""Parameters that several stages use, such as an embedding that is also the loss head's weight.

Each stage holds such a parameter and computes its part of the gradient; the parts are summed over
the ranks that hold it, so that all of them take the same optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compiler.pipeline_parallel.axes import PipelineAxis
from sp_compiler.runtime.parameter_gradients import local_tensor
from sp_compiler.runtime.weight_gradients import accumulate


class TiedParameters:
    """The parameters of this rank that other pipeline ranks hold too.

    Args:
        holders: stored name to the pipeline ranks that hold the parameter; the same on every rank.
        axis: the mesh axis of the pipeline.

    Attributes:
        holders: holders of parameters that several ranks hold.
    """

    def __init__(self, holders: Mapping[str, frozenset[int]], axis: PipelineAxis) -> None:
        self.holders = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self._axis = axis
        self._own = [name for name, ranks in self.holders.items() if axis.rank in ranks]

    @torch.no_grad()
    def before(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Remove and return ``grad``, which an earlier step has already summed over the ranks."""
        earlier = {}
        for name in self._own:
            grad = parameters[name].grad
            if grad is not None:
                earlier[name], parameters[name].grad = grad, None
        return earlier

    @staticmethod
    def restore(parameters: Mapping[str, Tensor], earlier: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`before` removed, after a step that failed."""
        for name, grad in earlier.items():
            parameters[name].grad = grad

    def after(self, parameters: Mapping[str, Tensor], earlier: Mapping[str, Tensor]) -> None:
        """Sum the gradients of this step over the holders, and add those that :meth:`before`
        removed."""
        for name in self._own:
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            own = parameter.grad
            # A holder whose stage did not use it still takes part, or others would wait forever.
            local = torch.zeros_like(local_tensor(parameter)) if own is None else local_tensor(own)
            total = self._sum(local.contiguous(), self.holders[name])
            parameter.grad = earlier.get(name)
            accumulate(parameter, total)

    @torch.no_grad()
    def _sum(self, own: Tensor, holders: frozenset[int]) -> Tensor:
        """Return the sum of ``own`` of all ``holders``, bitwise the same on each of them."""
        parts = {
            rank: own if rank == self._axis.rank else torch.empty_like(own)
            for rank in sorted(holders)
        }
        # By messages in the pipeline's group, not in a new group of the holders: torch names a new
        # group after the number of groups that a rank has, and ranks with different numbers would
        # wait for each other forever.
        messages = [
            dist.P2POp(operation, tensor, group=self._axis.group, group_peer=rank)
            for rank, part in parts.items()
            if rank != self._axis.rank
            for operation, tensor in ((dist.isend, own), (dist.irecv, part))
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        # In the same order on all holders.
        total, *others = parts.values()
        for part in others:
            total += part
        return total


def holders_of(
    parameters: Sequence[frozenset[str]], ranks: Sequence[int]
) -> dict[str, frozenset[int]]:
    """Return, by stored name, the pipeline ranks that hold a parameter.

    Args:
        parameters: parameters of each stage.
        ranks: rank of each stage.
    """
    holders: dict[str, set[int]] = {}
    for names, rank in zip(parameters, ranks, strict=True):
        for name in names:
            holders.setdefault(name, set()).add(rank)
    return {name: frozenset(holders[name]) for name in sorted(holders)}
