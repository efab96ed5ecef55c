"""Sends and receives between stages, whose waits end when a rank has failed.

A wait of gloo ends when the message arrives, or breaks the connections at its timeout; nothing else
can end it. So another thread looks at the board of the pipeline meanwhile, and breaks the
connections itself if it finds a failure::

    this thread    start receive, wait for the message ··················· raise: rank 1 failed
    the watchdog   ── look ────────────── look ────────────── look: break the connections

Only its message references a sent tensor, and frees it once it is sent. Schedules wait for some of
the messages only at the end of a step, and would hold their tensors until then. So when a stage
goes on to compute, a thread waits for the sends that the schedule has not waited for.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compiler.base.errors import RankFailureError, RankMismatchError
from sp_compiler.pipeline_parallel.lean_stage import LeanStage
from sp_compiler.runtime.failures.board import LOOK_EVERY, FailureBoard, RankWait

_SENT = torch.empty(0, device="cpu")
"""Placeholder for a tensor that only its message references."""
_NO_MESSAGE = 0x5FC0
"""A tag that no message uses: torch's stages leave the tag at 0."""


class Messages:
    """Messages of one rank to the other stages of its pipeline.

    Args:
        board: board of the ranks of the pipeline.
        timeout: how long to wait for a message.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.board = board
        self._sent: list[_Message] = []
        # One per peer: a message waits only for earlier ones on the same connection.
        self._waiters: dict[int, _Waiter] = {}
        self._watchdog = _Watchdog(board, timeout)

    def watch(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Watch the messages that ``ops`` start."""
        for op in ops:
            op.op = self._starting(op)
        return ops

    def _starting(self, op: dist.P2POp) -> Callable[..., _Message]:
        start, sends = op.op, op.op is dist.isend

        def started(tensor: Tensor, group: Any, tag: int, **peer: int) -> _Message:
            # torch takes any function other than its own isend for a receive.
            (rank,) = peer.values()
            side = {"group_dst" if sends else "group_src": rank}
            try:
                work = start(tensor, group=group, tag=tag, **side)
            except RuntimeError as error:
                self._explain(error)
                raise
            # Schedules keep the operations of a microbatch until those of the next one.
            op.tensor = _SENT
            message = _Message(self, work, sends, rank, group)
            if sends:
                self._sent.append(message)
            return message

        return started

    def leave_sent(self) -> None:
        """Let a thread wait for the sends that the schedule has not waited for, and hold their
        tensors."""
        for message in self._sent:
            if not message.is_over:
                waiter = self._waiters.get(message.rank) or _Waiter()
                self._waiters[message.rank] = waiter
                message.work = waiter.wait_for(message.work)
        self._sent.clear()

    def finish(self, message: _Message) -> None:
        """Wait for ``message``.

        Raises:
            RankFailureError: another rank has failed or is gone.
            RankMismatchError: the message did not arrive in time.
        """
        # Every message comes here: a context manager would take longer than all this.
        self._watchdog.message = message
        try:
            message.work.wait()
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self._watchdog.leave()

    def _explain(self, error: RuntimeError) -> None:
        """Raise the error that broke the connections, if ``error`` says that they are broken."""
        if self._watchdog.error is not None:
            raise self._watchdog.error from error
        self.board.raise_if_lost(error)


class _Message:
    """Replaces torch's handle of a message in flight; schedules call only its ``wait``.

    Attributes:
        work: torch's handle, or that of the thread that waits for it.
        sends: whether this rank sends it.
        rank: the rank at the other end, in ``group``.
        is_over: whether it has been received or sent.
    """

    def __init__(
        self, messages: Messages, work: Any, sends: bool, rank: int, group: dist.ProcessGroup
    ) -> None:
        self._messages = messages
        self.work = work
        self.sends = sends
        self.rank = rank
        self.group = group
        self.is_over = False

    def wait(self) -> None:
        """Wait until the message is received or sent."""
        if not self.is_over:
            self._messages.finish(self)
            # Dropping the handle frees the tensor.
            self.work, self.is_over = None, True


class _Waiter:
    """A thread that waits for messages one after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[dist.Work, _Wait] | None] = queue.SimpleQueue()
        # A daemon: waiting for a rank that is gone must not keep the process alive.
        threading.Thread(
            target=_wait_in_turn, args=(self._works,), name="stage messages", daemon=True
        ).start()
        # The thread ends with this object.
        weakref.finalize(self, self._works.put, None)

    def wait_for(self, work: dist.Work) -> _Wait:
        wait = _Wait()
        self._works.put((work, wait))
        return wait


def _wait_in_turn(works: queue.SimpleQueue[tuple[dist.Work, _Wait] | None]) -> None:
    # No local names here: they would keep the last message's tensor alive.
    while _waited(works.get()):
        pass


def _waited(item: tuple[dist.Work, _Wait] | None) -> bool:
    if item is None:
        return False
    work, wait = item
    try:
        work.wait()
    except RuntimeError as error:
        wait.end(error)
    else:
        wait.end(None)
    return True


class _Wait:
    """Handle of a message that a :class:`_Waiter` waits for."""

    def __init__(self) -> None:
        self._error: RuntimeError | None = None
        # Held until the end. An Event would create several locks, for each of many messages.
        self._running = threading.Lock()
        self._running.acquire()

    def end(self, error: RuntimeError | None) -> None:
        self._error = error
        self._running.release()

    def wait(self) -> None:
        """Wait for the end; to be called once."""
        self._running.acquire()
        if self._error is not None:
            raise self._error


class _Watchdog:
    """A thread that looks at the board while another one waits.

    Args:
        board: board of the ranks of the pipeline.
        timeout: how long a wait may take.

    Attributes:
        message: what the other thread waits for; ``None`` while it runs.
        error: why the connections were broken.
        timeout: how long a wait may take.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.message: _Message | None = None
        self.error: RuntimeError | None = None
        self.timeout = timeout
        self._board = board
        # For the message that the thread saw at its last look.
        self._wait: _MessageWait | None = None
        # A wait must not be published on the board after it has ended.
        self._looks = threading.Lock()
        # It ends with this object.
        threading.Thread(
            target=_look_periodically, args=(weakref.ref(self),), name="stage watch", daemon=True
        ).start()

    def leave(self) -> None:
        """End the wait for :attr:`message`."""
        with self._looks:
            self.message = None
            if self._wait is not None:
                self._wait.close()
                self._wait = None

    def look(self) -> None:
        """Break the connections of a wait that cannot succeed."""
        with self._looks:
            if self.message is None or self.error is not None:
                return
            self._wait = self._wait or _MessageWait(self._board, self.message, self.timeout)
            try:
                self._wait.look()
            except Exception as error:
                # Kept, because later waits end with broken connections too. The error may come from
                # the store, if its process is gone.
                is_known = isinstance(error, (RankFailureError, RankMismatchError))
                self.error = error if is_known else self._board.lost(error)  # type: ignore[assignment]
                _break_connections(self.message)


def _look_periodically(watchdog: weakref.ref[_Watchdog]) -> None:
    while True:
        time.sleep(LOOK_EVERY.total_seconds())
        alive = watchdog()
        if alive is None:
            return
        alive.look()
        del alive


def _break_connections(message: _Message) -> None:
    """End all waits in the group of ``message``: gloo does so when one of them times out."""
    with contextlib.suppress(RuntimeError):
        never: Any = dist.irecv(
            torch.empty(1, device="cpu"),
            group=message.group,
            group_src=message.rank,
            tag=_NO_MESSAGE,
        )
        never.wait(timedelta(milliseconds=1))


class _MessageWait(RankWait):
    """A wait for one stage; other ranks may wait for other stages meanwhile."""

    def __init__(self, board: FailureBoard, message: _Message, timeout: timedelta) -> None:
        purpose = "sends to" if message.sends else "waits for"
        super().__init__(board, f"{purpose} rank {message.rank}", "message", timeout)

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
        waits = [self._of(rank)[0] for rank in range(self._board.world_size)]
        purposes = [json.loads(text)[0] if text else "waits for no stage" for text in waits]
        raise RankMismatchError(
            f"rank {self._board.rank} of the {self._board.kind} {self._purpose} for "
            f"{self._timeout} (rank_timeout): "
            + ", ".join(f"rank {rank} {purpose}" for rank, purpose in enumerate(purposes))
        )


class WatchedStage(LeanStage):
    """A stage whose waits for messages are watched; ``messages`` may be ``None``."""

    def __init__(self, *args: Any, messages: Messages | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._messages = messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class."""
        return self._watched(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class."""
        return self._watched(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class."""
        return self._watched(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As in the base class."""
        return self._watched(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base class."""
        self._leave_sent()
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """As in the base class."""
        self._leave_sent()
        super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """As in the base class."""
        self._leave_sent()
        super().backward_weight_one_chunk(*args, **kwargs)

    def _leave_sent(self) -> None:
        if self._messages is not None:
            self._messages.leave_sent()

    def _watched(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return ops if self._messages is None else self._messages.watch(ops)
