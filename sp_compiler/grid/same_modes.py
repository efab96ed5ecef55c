"""Comparison of the modes in which ranks with different data call a module.

FSDP2 gathers parameters in every call, and the ranks of "ep" exchange rows. If one part of the data
is evaluated alone, or has one batch more, its ranks exchange with ranks that are in another call:
gloo ends a process where sizes differ, and where they match a rank computes with other parameters.

Modes change together with what a loop does, so they are compared when they change. Other calls of a
loop need no message for it.
"""

from __future__ import annotations

import torch

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.runtime.failures.board import FailureBoard
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.mesh_axes import EXPERT_AXIS, SHARD_AXIS


class SameModes:
    """Raises an error on all ranks if some change to a mode that others do not change to.

    Args:
        group: with the boards of the data axes.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self._timeout = group.timeout
        self._names: dict[FailureBoard, str] = {}
        # A forward on "dp_replicate" sends nothing, so its ranks may evaluate alone. The last board
        # is that of two axes together.
        for axis, board in zip(group.data.names, group.data_boards, strict=False):
            if axis in (SHARD_AXIS, EXPERT_AXIS):
                self._names[board] = board.new_user("modes")
        self._latest: str | None = None

    def begin_call(self, *, training: bool) -> None:
        """Compare the mode of this call, if it is not that of the previous one.

        Args:
            training: ``training`` of the module.

        Raises:
            RankMismatchError: other ranks are in another mode, or where they do not change it.
            RankFailureError: a rank has failed.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward
            return
        mode = "train()" if training else "eval()"
        mode += ", recording gradients" if torch.is_grad_enabled() else ", without gradients"
        if mode == self._latest:
            return
        self._latest = None  # if it fails, the next call compares again
        for board, name in self._names.items():
            modes = board.exchange(name, mode, f"calls the module in {mode}", self._timeout)
            if len(set(modes)) > 1:
                found = ", ".join(f"rank {rank} in {text}" for rank, text in enumerate(modes))
                raise RankMismatchError(
                    f"the ranks of the {board.kind} call the module in different modes ({found}): "
                    "parameters are gathered from all of them in every call; train and evaluate "
                    "with as many batches on each part of the data"
                )
        self._latest = mode
