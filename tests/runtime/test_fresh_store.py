"""The part of a store that one start of the processes shares, and no earlier start knows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import sp_compiler
from sp_compiler import ArgumentError, RankMismatchError
from sp_compiler.runtime.failures.fresh_store import agreed_store

_PATIENCE = timedelta(seconds=20)


def _start(store: dist.Store, world_size: int = 3) -> list[dist.Store]:
    """One start of all ranks."""
    with ThreadPoolExecutor(world_size) as pool:
        arguments = [(store, rank, world_size, _PATIENCE) for rank in range(world_size)]
        return list(pool.map(lambda each: agreed_store(*each), arguments))


def test_ranks_share_what_earlier_starts_do_not_know() -> None:
    store = dist.HashStore()
    for start in range(3):
        views = _start(store)
        assert not any(view.check(["address"]) for view in views)
        views[0].set("address", str(start))
        assert all(view.get("address") == str(start).encode() for view in views)


def test_starts_that_were_cut_off_are_passed_over() -> None:
    store = dist.HashStore()
    # Rank 0 proposed a name and was killed; before, rank 1 answered another one.
    store.set("start", "name")
    store.set("name/1", "a process that is gone")
    with pytest.raises(RankMismatchError, match="rank 1 of 3 ranks is there, but rank 0"):
        agreed_store(store, 1, 3, timedelta(seconds=0.1))
    views = _start(store)
    views[2].set("key", "value")
    assert views[1].get("key") == b"value"
    # All of a start were listed, and then it ended: the list is no answer to who comes now.
    with pytest.raises(RankMismatchError, match="rank 2 of 3 ranks is there"):
        agreed_store(store, 2, 3, timedelta(seconds=0.1))
    with pytest.raises(
        RankMismatchError, match="rank 0 of 3 ranks is there, but the others have not"
    ):
        agreed_store(store, 0, 3, timedelta(seconds=0.1))


def test_one_rank_waits_for_nobody() -> None:
    agreed_store(dist.HashStore(), 0, 1, timedelta(0)).set("key", "value")


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match=r"RANK.*start the processes with torchrun"):
        sp_compiler.fresh_store()


@pytest.mark.parametrize("timeout", ["soon", None, True, 0, -1.0, float("nan"), float("inf")])
def test_a_wait_that_is_no_number(timeout: Any) -> None:
    with pytest.raises(ArgumentError, match=r"timeout=.*: expected a positive number of seconds"):
        sp_compiler.fresh_store(timeout)
