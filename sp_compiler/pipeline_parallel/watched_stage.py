"""Sends and receives between stages, whose waits check periodically whether a rank has failed.

Gloo's wait for a message ends with the message, or breaks the connection at its timeout. So another
thread waits for it, while this one checks the board of the pipeline::

    this thread    start receive ── look ── look ── raise: rank 1 failed: ...
    the waiter              wait for the message ··············

Only the message holds a sent tensor, and frees it once it is sent: schedules wait for all messages
at the end of a step, and would hold all sent tensors until then.
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

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.pipeline_parallel.lean_stage import LeanStage
from sp_compiler.runtime.failures.board import LOOK_EVERY, FailureBoard, RankWait


class Messages:
    """Messages of one rank to the other stages of its pipeline.

    Args:
        board: board of the ranks of the pipeline.
        timeout: how long to wait for a message.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.board = board
        self._timeout = timeout
        # By direction and rank: a message waits for those before it on its own connection alone.
        self._waiters: dict[tuple[bool, int], _Waiter] = {}

    def watch(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Watch the messages that ``ops`` start."""
        for op in ops:
            op.op = self._starting(op)
        return ops

    def _starting(self, op: dist.P2POp) -> Callable[..., _Message]:
        start, sends = op.op, op.op is dist.isend
        purpose = "sends to" if sends else "waits for"

        def started(tensor: Tensor, group: Any, tag: int, **peer: int) -> _Message:
            # torch calls what is not its own isend a receive.
            (rank,) = peer.values()
            side = {"group_dst" if sends else "group_src": rank}
            work = start(tensor, group=group, tag=tag, **side)
            # Schedules hold the operations of a microbatch until those of the next one.
            op.tensor = tensor.new_empty(0)
            waiter = self._waiters.get((sends, rank)) or _Waiter()
            self._waiters[sends, rank] = waiter
            message = _Message(self, waiter, work, f"{purpose} rank {rank}")
            if sends:
                # At once, for what it sends is held until then.
                message.begin_wait()
            return message

        return started

    def finish(self, wait: _Wait, purpose: str) -> None:
        """Return when ``wait`` is over.

        Raises:
            RankFailureError: another rank has failed or is gone.
            RankMismatchError: the message does not come in time.
        """
        look_every_s = LOOK_EVERY.total_seconds()
        if not wait.is_over(look_every_s):
            waiting = _MessageWait(self.board, purpose, -1, self._timeout)
            with contextlib.closing(waiting):
                waiting.look()
                while not wait.is_over(look_every_s):
                    waiting.look()
        if wait.error is not None:
            raise self.board.lost(wait.error) from wait.error


class _Wait:
    """State of a message: complete, or failed with ``error``."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        # Held until it is over. An event makes several locks, for each of many messages.
        self._running = threading.Lock()
        self._running.acquire()

    def end(self, error: RuntimeError | None) -> None:
        self.error = error
        self._running.release()

    def is_over(self, timeout_s: float) -> bool:
        """Wait for the end for at most ``timeout_s``; to be called until it is true."""
        return self._running.acquire(timeout=timeout_s)


class _Waiter:
    """A thread that waits for messages one after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[dist.Work, _Wait]] = queue.SimpleQueue()
        # It may be left waiting for a rank that is gone, which is no reason for a process to stay.
        threading.Thread(target=self._wait_in_turn, name="stage messages", daemon=True).start()

    def wait_for(self, work: dist.Work) -> _Wait:
        wait = _Wait()
        self._works.put((work, wait))
        return wait

    def _wait_in_turn(self) -> None:
        while True:
            # Without names of its own, which would hold the last message's tensor.
            self._wait(*self._works.get())

    def _wait(self, work: dist.Work, wait: _Wait) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            wait.end(error)
        else:
            wait.end(None)


class _Message:
    """Replaces torch's handle of a message in flight; schedules call only its ``wait``."""

    def __init__(self, messages: Messages, waiter: _Waiter, work: dist.Work, purpose: str) -> None:
        self._messages = messages
        self._waiter = waiter
        self._work: dist.Work | None = work
        self._purpose = purpose
        self._wait: _Wait | None = None

    def begin_wait(self) -> _Wait:
        """Let the thread wait for it and hold its tensor."""
        if self._wait is None:
            assert self._work is not None
            self._wait, self._work = self._waiter.wait_for(self._work), None
        return self._wait

    def wait(self) -> None:
        """Wait until the message is received or sent."""
        self._messages.finish(self.begin_wait(), self._purpose)


class _MessageWait(RankWait):
    """A wait for one stage; other ranks may wait for other stages meanwhile."""

    def look(self) -> None:
        """Raise an error if this wait cannot succeed.

        Raises:
            RankFailureError: a rank has failed.
            RankMismatchError: timeout; the message says which rank waits for which.
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


class WatchedStage(LeanStage):
    """A stage whose waits for messages are watched; ``messages`` may be ``None``."""

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
