"""A key-value store without leftovers of earlier starts.

Torchrun's agent keeps one store for all restarts of its workers (pytorch#135712). A restarted
process finds in it the addresses of killed processes and reports of their failures::

    start 1   rank 0 ── "connect to me at port 5003" ──> store        killed
    start 2   rank 1 ── reads port 5003 ── waits for half an hour

The ranks of this start therefore agree on a new name, and use it as a prefix.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from sp_compiler.base.errors import ArgumentError, RankMismatchError
from sp_compiler.base.units import check_seconds

_LOOK_EVERY_S = 0.01  # how often a rank asks the store whether the others have arrived


def fresh_store(timeout: float = 300.0) -> dist.Store:
    """Return a part of ``torchrun``'s key-value store that belongs to this start alone.

    With it, processes that ``torchrun --max-restarts`` starts again do not read what killed ones
    left in the store. Every rank must call it, once per start:

    >>> torch.distributed.init_process_group(
    ...     store=sp_compiler.fresh_store(),
    ...     rank=int(os.environ["RANK"]),
    ...     world_size=int(os.environ["WORLD_SIZE"]),
    ... )

    Args:
        timeout: seconds to wait for the other ranks.

    Raises:
        ArgumentError: the environment variables that ``torchrun`` sets for a rank are missing, or
            ``timeout`` is not a positive number.
        RankMismatchError: not all ranks called it in time.
    """
    check_seconds("timeout", timeout)
    try:
        store, rank, world_size = next(
            dist.rendezvous("env://", timeout=timedelta(seconds=timeout))
        )
    except ValueError as error:
        raise ArgumentError(
            f"fresh_store() reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT ({error}): start "
            "the processes with torchrun"
        ) from error
    return agreed_store(store, rank, world_size, timedelta(seconds=timeout))


def agreed_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a part of ``store`` that only these processes use.

    Raises:
        RankMismatchError: not all ranks came in time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    name = _named(store, own, world_size, deadline) if rank == 0 else None
    while name is None and time.monotonic() < deadline:
        name = _joined(store, own, rank)
        time.sleep(_LOOK_EVERY_S)
    if name is None:
        who = "the others have not all" if rank == 0 else "rank 0, or another one, has not"
        raise RankMismatchError(
            f"rank {rank} of {world_size} ranks is there, but {who} come after {timeout}: "
            "every rank must make the same process groups and modules"
        )
    return dist.PrefixStore(name, store)


def _named(store: dist.Store, own: str, world_size: int, deadline: float) -> str | None:
    """On rank 0: propose a name and list the processes; ``None`` if they do not arrive in time."""
    store.set("start", own)
    keys = [f"{own}/{other}" for other in range(1, world_size)]
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_EVERY_S)
    store.set(f"{own}/all", json.dumps([own, *(store.get(key).decode() for key in keys)]))
    return own


def _joined(store: dist.Store, own: str, rank: int) -> str | None:
    """On other ranks: return the name under which rank 0 lists this process; ``None`` if there is
    none yet."""
    if not store.check(["start"]):
        return None
    # It may be from an earlier rank 0, which lists the process that was this rank then.
    name = store.get("start").decode()
    if not store.check([f"{name}/all"]):
        store.set(f"{name}/{rank}", own)
        return None
    return name if json.loads(store.get(f"{name}/all"))[rank] == own else None
