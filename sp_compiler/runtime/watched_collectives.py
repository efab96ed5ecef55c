"""CPU collectives whose waits check periodically whether another rank has failed.

A wait for one of torch's functional collectives ends only with the collective. This module keeps
the handles of collectives in flight, and waits for them in slices of time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from sp_compiler.ops.communicator import FunctionalCollectives
from sp_compiler.runtime.failures.board import LOOK_EVERY, FailureBoard, RankWait

_FINISH_SECONDS = 0.05
_IN_A_STEP = "waits in a forward or backward"
_OPERATIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def outside_modes() -> AbstractContextManager[Any]:
    """Return a context that hides what is not part of the step from the caller's modes."""
    # Every call asks, and disabling no mode takes as long as disabling many.
    return nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes()


def is_gloo(process_group: dist.ProcessGroup, device_type: str = "cpu") -> bool:
    """Return whether tensors of the group on a device of that type go through gloo."""
    try:
        return process_group._get_backend(torch.device(device_type)).name() == "gloo"
    except RuntimeError:  # a group for other devices only
        return False


@functools.cache
def let_gloo_finish() -> None:
    """Make the interpreter wait at its exit until gloo's threads are done with their last tensors.

    A collective wakes the rank that waits for it and then frees its tensors, which takes the GIL.
    If the interpreter is finalized meanwhile, as after a script whose last statement is
    ``full_tensor()``, the process aborts ("terminate called without an active exception") after
    correct results: 5 of 48 processes did, with plain torch.
    """
    # Sleeping releases the GIL.
    atexit.register(time.sleep, _FINISH_SECONDS)


class WatchedCollectives(FunctionalCollectives):
    """Collectives of a group; on accelerators, where the host does not wait, functional ones.

    Args:
        process_group: a group with a backend for CPU tensors.
        board: board of the group.
        timeout: how long to wait for the other ranks.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, board: FailureBoard, timeout: timedelta
    ) -> None:
        super().__init__(process_group.group_name)
        self._process_group = process_group
        self._backend: Any = process_group._get_backend(torch.device("cpu"))
        self._board = board
        self._timeout = timeout

    def all_gather(self, x: Tensor, world_size: int) -> Callable[[], Tensor]:
        if not x.is_cpu:
            return super().all_gather(x, world_size)
        if x.is_complex():  # which gloo does not gather
            arrive = self.all_gather(torch.view_as_real(x.resolve_conj()), world_size)
            return lambda: torch.view_as_complex(arrive())
        self.begin()
        ranks = x.new_empty((world_size * x.shape[0], *x.shape[1:]))
        return self.arrival(self._process_group._allgather_base(ranks, x), ranks)

    def gather_numbers(self, numbers: list[int], purpose: str) -> Callable[[], list[list[int]]]:
        """Start to gather a few integers of every rank; returns a function that waits for them."""
        self.begin()
        # In every call, so it bypasses the dispatcher, which takes longer than all else.
        own, ranks = np.array(numbers), np.empty(self._board.world_size * len(numbers), np.int64)
        with outside_modes():
            result = torch.from_numpy(ranks)
            work = self._backend._allgather_base(result, torch.from_numpy(own))
        arrive = self.arrival(work, result, purpose)

        def everyone() -> list[list[int]]:
            arrive()
            rows: list[list[int]] = ranks.reshape(-1, len(numbers)).tolist()
            return rows

        return everyone

    def reduce_scatter(
        self,
        x: Tensor,
        world_size: int,
        op: Any = dist.ReduceOp.SUM,
        purpose: str = _IN_A_STEP,
    ) -> Callable[[], Tensor]:
        if not x.is_cpu:
            return super().reduce_scatter(x, world_size)
        self.begin()
        if _get_current_dispatch_mode() is not None:
            # Modes that count collectives should see the one that was asked for.
            super().reduce_scatter(x.to("meta"), world_size)
        # Gloo's own reduce-scatter runs an all-reduce for every part, which takes twice as long for
        # the same result, and its wait does not support a timeout.
        summed = x.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        arrive = self.arrival(self._backend.allreduce([summed], options), summed, purpose)
        return lambda: arrive().chunk(world_size)[self._board.rank].clone()

    def all_reduce(self, x: Tensor, op: str, in_place: bool = False) -> Callable[[], Tensor]:
        if not x.is_cpu:
            return super().all_reduce(x, op, in_place)
        self.begin()
        result = x if in_place else x.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]
        return self.arrival(self._process_group.allreduce([result], options), result)

    def all_to_all(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], Tensor]:
        if not x.is_cpu:
            return super().all_to_all(x, sent, received)
        self.begin()
        result = x.new_empty((sum(received), *x.shape[1:]))
        options = dist.AllToAllOptions()
        work = self._process_group.alltoall_base(result, x, list(received), list(sent), options)
        return self.arrival(work, result)

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's values into ``x`` on every rank."""
        self.begin()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.arrival(self._process_group.broadcast([x], options), x)()

    def _finish(self, work: dist.Work, number: int, purpose: str) -> None:
        """Wait for collective ``number``.

        Raises:
            RankFailureError: another rank has failed or is gone.
            RankMismatchError: another rank waits for something else, or has not arrived in time.
        """
        place = f"collective {number}"
        with contextlib.closing(RankWait(self._board, purpose, place, self._timeout)) as wait:
            while True:
                try:
                    work.wait(LOOK_EVERY)
                    return
                except RuntimeError:
                    # Also raised at the end of a slice, by which the collective may have ended.
                    if work.is_completed():
                        break
                wait.look()
        try:
            work.wait()
        except RuntimeError as error:
            self._board.raise_if_lost(error)
            raise

    def arrival(
        self, work: dist.Work, result: Tensor, purpose: str = _IN_A_STEP
    ) -> Callable[[], Tensor]:
        """Return a function that waits for ``work``, the latest collective."""
        number = self._board.num_started

        def arrive() -> Tensor:
            self._finish(work, number, purpose)
            return result

        return arrive

    def begin(self) -> None:
        """Count the collective that starts next.

        Raises:
            RankFailureError: the group is unusable after a failure.
        """
        # Else its number would be from before the failure, and its wait would raise that again.
        self._board.begin_anew(self._timeout)
        before, self._board.before_next = self._board.before_next, None
        if before is not None:
            before()
        self._board.num_started += 1
