"""Failures on one rank, reported to the others: all raise errors instead of waiting for a rank that
is gone.

::

    rank 1 raises ──> its text into the group's key-value store, and the error on to the user
    rank 0 waits  ──> looks into the store every half second, finds the text, raises with it

A wait for a collective that ends sooner neither writes to the store nor reads from it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.utils.checkpoint import _StopRecomputationError

from sp_compiler.base.errors import RankFailureError, RankMismatchError
from sp_compiler.runtime.failures.fresh_store import agreed_store

LOOK_EVERY = timedelta(seconds=0.5)
# Ranks that wait for different things this long will wait forever. A shorter time could be the
# delay between the end of one collective on this rank and on another, on a busy machine.
_DEADLOCK_S = 3.0
# A rank that dies writes its error before its connections close; the store may be slower.
_GRACE_S = 2.0


class FailureBoard:
    """Failures on the ranks of one process group, and the waits of its ranks.

    They are counted in rounds. If every rank has raised an error after the same number of
    collectives, nothing is in flight and the group can be used again: the next call begins a new
    round. Otherwise the group is unusable, and every further call says so.

    Args:
        process_group: a group of several processes.
        kind: name of the group in messages.
        timeout: how long to wait for the other ranks to create theirs.

    Attributes:
        rank: this rank in the group.
        timeout: how long its latest user wants to wait for the other ranks.
        num_started: number of collectives that this rank has started.
        unfinished_step: the optimizer whose ``step()`` has started but not finished.
        trains: whether a call recorded a graph, so that errors in backward concern the group.
        before_next: function that runs once, before the next collective starts.
    """

    def __init__(self, process_group: dist.ProcessGroup, kind: str, timeout: timedelta) -> None:
        self.kind = kind
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        # Reports of an earlier start of these ranks must not stop this one.
        store = dist.PrefixStore("sp_compiler", _get_process_group_store(process_group))
        self.store = agreed_store(store, self.rank, self.world_size, timeout)
        self.timeout = timeout
        self.num_started = 0
        self.unfinished_step: str | None = None
        self.trains = False
        self.before_next: Callable[[], None] | None = None
        self._num_users: Counter[str] = Counter()
        self._num_exchanges: Counter[str] = Counter()
        self._round = 0
        self._failed = False
        self._broken: str | None = None

    def new_user(self, kind: str) -> str:
        """Return a name for the exchanges of one more user of that kind, such as a module; all
        ranks create these in the same order."""
        # Counted by board: a rank may also have modules of its own, or of other groups.
        number = self._num_users[kind]
        self._num_users[kind] += 1
        return f"{kind} {number}"

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Context whose errors raise on the other ranks too."""
        try:
            yield
        except _StopRecomputationError:
            # Not an error: a checkpoint ends its recomputation this way, once it has what it needs.
            raise
        except BaseException as error:
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Report ``error`` to the other ranks, unless this rank has already failed in this
        round."""
        if self._failed:
            return
        self._failed = True
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        record = {"text": "\n".join(lines), "started": self.num_started}
        # If the process that serves the store is gone, connections break on all ranks anyway.
        with contextlib.suppress(RuntimeError):
            self.store.set(self._key(self.rank), json.dumps(record))
            if self.store.add(self._key("reports"), 1) == 1:
                self.store.set(self._key("first"), str(self.rank))

    def report_unfinished_step(self) -> None:
        """Report that an error has ended an optimizer's step halfway, if one has."""
        if self.unfinished_step is not None:
            step, self.unfinished_step = self.unfinished_step, None
            # Its parameters are changed in part: going on would let the ranks' weights drift apart.
            self.report(RuntimeError(f"{step}.step() raised an error"))

    def raise_if_failed(self) -> None:
        """Raise :class:`RankFailureError` if a rank has failed in this round."""
        if self.store.check([self._key("first")]):
            first = int(self.store.get(self._key("first")))
            text = self._record(first)["text"]
            raise RankFailureError(f"rank {first} of the {self.kind} failed: {text}")

    def require_usable(self, timeout: timedelta) -> None:
        """Raise an error unless all ranks can continue, possibly after a common failure.

        Raises:
            RankFailureError: another rank failed at another point, or did not fail.
        """
        self.report_unfinished_step()
        self.begin_anew(timeout)

    def begin_anew(self, timeout: timedelta) -> None:
        """Begin a new round if this rank has failed in the current one: its error was raised.

        Raises:
            RankFailureError: as :meth:`require_usable`.
        """
        if self._broken is None and self._failed:
            self._broken = self._unusable(timeout)
        if self._broken is not None:
            raise RankFailureError(self._broken)

    def raise_if_lost(self, error: RuntimeError) -> None:
        """Raise :meth:`lost` if ``error`` of a wait is from a broken connection."""
        # Gloo names the file that raises an error. An error that is not from a connection, such as
        # for a type that it does not reduce, is not a sign that a rank is gone.
        if "gloo/transport" in str(error):
            raise self.lost(error) from error

    def lost(self, error: Exception) -> RankFailureError:
        """Return the error for a broken connection: that of the rank that broke it, if it reported
        one."""
        deadline = time.monotonic() + _GRACE_S
        try:
            while time.monotonic() < deadline:
                self.raise_if_failed()
                time.sleep(0.1)
        except RankFailureError as failure:
            return failure
        except RuntimeError:  # of the store
            pass
        return RankFailureError(
            f"a rank of the {self.kind} is gone: its process has ended, or its process group was "
            f"destroyed ({_of_gloo(error)})"
        )

    def exchange(self, name: str, text: str, purpose: str, timeout: timedelta) -> list[str]:
        """Return the texts of all ranks that come to the same exchange under ``name``; wait for
        them.

        Raises:
            RankFailureError, RankMismatchError: a rank failed, or does not arrive.
        """
        # An error that all ranks have already raised is not to be reported again.
        self.begin_anew(timeout)
        self._num_exchanges[name] += 1
        count = self._num_exchanges[name]
        here = f"exchanges/{self._round}/{name}/{count}"
        keys = [f"{here}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], text)
        pause_s = 0.001
        with contextlib.closing(
            RankWait(self, purpose, f"{name}, exchange {count}", timeout)
        ) as wait:
            while not self.store.check(keys):
                time.sleep(pause_s)
                # Ranks usually arrive together; a longer wait need not ask as often.
                pause_s = min(2 * pause_s, LOOK_EVERY.total_seconds())
                if pause_s < LOOK_EVERY.total_seconds():
                    continue
                try:
                    wait.look()
                except RankFailureError:
                    # A faster rank may have raised because of what these texts say.
                    if not self.store.check(keys):
                        raise
        # Whoever comes to an exchange has read the one before. In pipelines with hooks, which have
        # one in every step, old texts would fill the store.
        self.store.delete_key(f"exchanges/{self._round}/{name}/{count - 1}/{self.rank}")
        return [self.store.get(key).decode() for key in keys]

    def _unusable(self, timeout: timedelta) -> str | None:
        """Return why this group cannot continue after the failures of this round; ``None`` if it
        can."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.01)
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        if missing:
            return f"rank {self.rank} failed and rank {_listed(missing)} did not; start all again"
        records = [self._record(rank) for rank in range(self.world_size)]
        if len({record["started"] for record in records}) > 1:
            first = int(self.store.get(self._key("first")))
            return (
                f"the ranks stopped at different places when rank {first} of the {self.kind} "
                f"failed: {records[first]['text']}\nThe group cannot be used any more; start "
                "all ranks again"
            )
        self._round += 1
        self._failed = False
        # A rank may have come to an exchange that another one never reached.
        self._num_exchanges.clear()
        return None

    def _record(self, rank: int) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.store.get(self._key(rank)))
        return record

    def _key(self, name: object) -> str:
        return f"failures/{self._round}/{name}"


class RankWait:
    """One wait for the other ranks: call :meth:`look` periodically, and :meth:`close` at its end.

    Args:
        board: board of the group.
        purpose: a verb phrase, such as "calls the module".
        place: what must match too: the module and its exchanges so far, or the collectives.
        timeout: how long to wait.
    """

    def __init__(self, board: FailureBoard, purpose: str, place: str, timeout: timedelta) -> None:
        self._board = board
        self._purpose = purpose
        self._place = place
        self._timeout = timeout
        self._start = time.monotonic()
        self._num_looks = 0
        self._stuck: list[str] = []
        self._stuck_since = 0.0
        self._stuck_looks: list[int] = []

    def look(self) -> None:
        """Raise an error if this wait cannot succeed.

        Raises:
            RankFailureError: a rank has failed.
            RankMismatchError: another rank waits for something else, or has not arrived in time.
        """
        board, now = self._board, time.monotonic()
        board.raise_if_failed()
        self._publish()
        published = [self._of(rank) for rank in range(board.world_size)]
        purposes, looks = [purpose for purpose, _ in published], [number for _, number in published]
        # As long as one rank runs, all others may still continue.
        stuck = purposes if all(purposes) and len(set(purposes)) > 1 else []
        if stuck != self._stuck:
            self._stuck, self._stuck_since, self._stuck_looks = stuck, now, looks
        # A rank that was stopped, by a debugger or with its machine, may find what it waits for as
        # soon as it runs again: each must have looked, from start to end, and still wait.
        still = all(new > old + 1 for new, old in zip(looks, self._stuck_looks, strict=False))
        if stuck and still and now - self._stuck_since > _DEADLOCK_S:
            waits = [f"rank {rank} {text}" for rank, text in enumerate(_told_apart(stuck))]
            raise RankMismatchError(
                f"the ranks wait for each other, {', '.join(waits)}: all ranks of a {board.kind} "
                "must do the same, in the same order"
            )
        if now - self._start > self._timeout.total_seconds():
            late = [rank for rank, text in enumerate(purposes) if text != self._own]
            raise RankMismatchError(
                f"rank {board.rank} {self._purpose}, but rank {_listed(late)} does not after "
                f"{self._timeout} (rank_timeout): all ranks of a {board.kind} must do the same, in "
                "the same order, with the same inputs if they share a batch"
            )

    @property
    def _own(self) -> str:
        # On demand: most waits end before anything is published.
        return json.dumps([self._purpose, self._place])

    def close(self) -> None:
        """Withdraw this rank's published wait, if there is one."""
        if self._num_looks:
            with contextlib.suppress(RuntimeError):  # the store may be gone, with its process
                self._board.store.set(_waits(self._board.rank), "")

    def _publish(self) -> None:
        self._num_looks += 1
        published = json.dumps([self._own, self._num_looks])
        self._board.store.set(_waits(self._board.rank), published)

    def _of(self, rank: int) -> tuple[str, int]:
        """Return the wait of ``rank``, empty while it runs, and how often it has looked."""
        key = _waits(rank)
        store = self._board.store
        published = store.get(key).decode() if store.check([key]) else ""
        own, num_looks = json.loads(published) if published else ("", 0)
        return own, num_looks


def _told_apart(waits: list[str]) -> list[str]:
    """Return the purposes of published waits, with their places if the purposes are the same."""
    purposes, places = zip(*map(json.loads, waits), strict=True)
    if len(set(purposes)) > 1:
        return list(purposes)
    return [f"{purpose} ({place})" for purpose, place in zip(purposes, places, strict=True)]


def _waits(rank: int) -> str:
    return f"waits/{rank}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _of_gloo(error: Exception) -> str:
    """Return gloo's message about a connection, without its own source line and its advice."""
    said, _, _ = re.sub(r"^\[[^\]]*gloo/transport[^\]]*\] ", "", str(error)).partition(". This is ")
    return said
