"""Sends and receives between stages whose waits look, from time to time, whether a rank has failed.

Gloo's wait for a message ends with the message, or breaks the connection when its time is over. So
a thread waits for it, while this one looks at the board of the pipeline::

    this thread    start receive ── look ── look ── raise: rank 1 failed: ...
    the waiter              wait for the message ··············
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.runtime.failures.board import LOOK_EVERY, FailureBoard, RankWait


class Messages:
    """Messages of one rank to the other stages of its pipeline.

    Args:
        board: of the ranks of the pipeline.
        timeout: how long to wait for one of them.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.board = board
        self._timeout = timeout
        self._waits: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # It may be left waiting for a rank that is gone, which is no reason for a process to stay.
        threading.Thread(target=self._wait_in_turn, name="stage messages", daemon=True).start()

    def watch(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Have what ``ops`` start be waited for with a look at the board."""
        for op in ops:
            op.op = self._starting(op.op)
        return ops

    def _starting(self, start: Callable[..., Any]) -> Callable[..., _Message]:
        sends = start is dist.isend

        def started(tensor: Tensor, group: Any, tag: int, **peer: int) -> _Message:
            # torch calls what is not its own isend a receive.
            (rank,) = peer.values()
            side = {"group_dst" if sends else "group_src": rank}
            work = start(tensor, group=group, tag=tag, **side)
            return _Message(self, work, f"{'sends to' if sends else 'waits for'} rank {rank}")

        return started

    def finish(self, work: dist.Work, purpose: str) -> None:
        """Wait for ``work``.

        Raises:
            RankFailureError: another rank has failed or is gone.
            RankMismatchError: it does not come in time.
        """
        over, errors = threading.Event(), []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)
            over.set()

        self._waits.put(wait)
        with contextlib.closing(_MessageWait(self.board, purpose, -1, self._timeout)) as waiting:
            while not over.wait(LOOK_EVERY.total_seconds()):
                waiting.look()
        if errors:
            raise self.board.lost(errors[0]) from errors[0]

    def _wait_in_turn(self) -> None:
        while True:
            self._waits.get()()


class _Message:
    """Stands for torch's object of a message on its way, of which schedules call ``wait`` alone."""

    def __init__(self, messages: Messages, work: dist.Work, purpose: str) -> None:
        self._messages = messages
        self._work = work
        self._purpose = purpose

    def wait(self) -> None:
        """Wait until the message is there, or gone out."""
        self._messages.finish(self._work, self._purpose)


class _MessageWait(RankWait):
    """A wait for one stage, while others may wait for other ones for as long as a message takes."""

    def look(self) -> None:
        """Raise where this wait is in vain.

        Raises:
            RankFailureError: a rank has failed.
            RankMismatchError: the time is over; it says who waits for whom.
        """
        self._board.raise_if_failed()
        self._publish()
        if time.monotonic() - self._start <= self._timeout.total_seconds():
            return
        waits = [self._of(rank) for rank in range(self._board.world_size)]
        told = [json.loads(text)[0] if text else "waits for no stage" for text in waits]
        raise RankMismatchError(
            f"rank {self._board.rank} of the {self._board.kind} {self._purpose} for "
            f"{self._timeout} (rank_timeout): "
            + ", ".join(f"rank {rank} {purpose}" for rank, purpose in enumerate(told))
        )


class WatchedStage(PipelineStage):
    """A stage of torch's whose messages are watched; ``messages`` may be ``None``."""

    def __init__(self, *args: Any, messages: Messages | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._messages = messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_bwd_send_ops(bwd_chunk_id))

    def _watched(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return ops if self._messages is None else self._messages.watch(ops)
