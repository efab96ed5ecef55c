"""Errors that count as the failure of a rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_compiler import RankFailureError, RankMismatchError
from sp_compiler.runtime.failures import board
from sp_compiler.runtime.failures.board import FailureBoard, RankWait

_PATIENCE = timedelta(seconds=20)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    errors: list[BaseException] = []
    monkeypatch.setattr(FailureBoard, "report", lambda board, error: errors.append(error))
    return errors


def test_the_early_end_of_a_checkpoint_is_no_failure(reported: list[BaseException]) -> None:
    silent = FailureBoard.__new__(FailureBoard)

    def call(x: Tensor) -> Tensor:
        with silent.reporting():
            return x.sin().exp() + 1

    x = torch.randn(3, requires_grad=True)
    checkpoint(call, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert not reported


def test_an_error_is_a_failure(reported: list[BaseException]) -> None:
    silent = FailureBoard.__new__(FailureBoard)
    with pytest.raises(ZeroDivisionError), silent.reporting():
        raise ZeroDivisionError
    assert [type(error) for error in reported] == [ZeroDivisionError]


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[FailureBoard]:
    """The boards of two ranks, which are threads here."""
    store = dist.HashStore()
    monkeypatch.setattr(board.dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(board.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(board, "_get_process_group_store", lambda group: store)
    return _on_ranks(
        lambda rank: FailureBoard(SimpleNamespace(rank=rank), "group of two", _PATIENCE)  # type: ignore[arg-type]
    )


def _on_ranks(call: Callable[[int], Any]) -> list[Any]:
    """What each of two ranks returns, or the error that it raises."""

    def of(rank: int) -> Any:
        try:
            return call(rank)
        except (ValueError, RankFailureError, RankMismatchError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, range(2)))


def test_an_error_that_all_ranks_raised_is_over(boards: list[FailureBoard]) -> None:
    """What comes next is compared afresh: with no earlier error, nor what a rank came for then."""

    def fails(rank: int) -> None:
        with boards[rank].reporting():
            if rank == 0:
                boards[0].exchange("module 0", "saves", "saves", timedelta(seconds=0.2))
            raise ValueError(f"mistake of rank {rank}")

    def exchanges(rank: int) -> list[str]:
        return boards[rank].exchange("module 0", f"of {rank}", "compares", _PATIENCE)

    for _ in range(2):
        first, second = _on_ranks(fails)
        assert isinstance(first, (RankFailureError, RankMismatchError))
        assert str(second) == "mistake of rank 1"
        assert _on_ranks(exchanges) == [["of 0", "of 1"]] * 2


def test_exchanges_do_not_fill_the_store(boards: list[FailureBoard]) -> None:
    def exchanges(rank: int) -> int:
        for count in range(20):
            assert (
                boards[rank].exchange("module 0", f"{count}", "calls", _PATIENCE)
                == [f"{count}"] * 2
            )
        return boards[rank].store.num_keys()

    before = boards[0].store.num_keys()
    # The latest may still be read, and the other rank deletes its text of the one before later.
    assert max(_on_ranks(exchanges)) <= before + 3


def test_an_error_of_one_rank_alone_is_not_over(boards: list[FailureBoard]) -> None:
    error = ValueError("a mistake")
    error.add_note("in the second layer")
    boards[1].report(error)
    said = _on_ranks(lambda rank: boards[rank].exchange("x", "", "comes", timedelta(seconds=0.7)))
    text = "ValueError: a mistake\nin the second layer"
    assert f"rank 1 of the group of two failed: {text}" in str(said[0])
    assert "rank 1 failed and rank 0 did not" in str(said[1])


def test_ranks_that_come_for_the_same_of_other_modules(
    boards: list[FailureBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error that one rank caught, say: they would wait until the end of their patience."""
    monkeypatch.setattr(board, "LOOK_EVERY", timedelta(seconds=0.03))
    monkeypatch.setattr(board, "_DEADLOCK_S", 0.1)

    def exchange(rank: int) -> None:
        with boards[rank].reporting():
            boards[rank].exchange(f"module {rank}", "", "compares", timedelta(seconds=5))

    said = "\n".join(map(str, _on_ranks(exchange)))
    assert (
        "rank 0 compares (module 0, exchange 1), rank 1 compares (module 1, exchange 1): all"
        in said
    )


def test_a_rank_that_is_stopped_while_it_waits_is_waited_for(
    boards: list[FailureBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has published is no sign that it does not have by now what it waits for."""
    monkeypatch.setattr(board, "_DEADLOCK_S", 0.0)
    stopped, other = (RankWait(boards[rank], f"does {rank}", "", _PATIENCE) for rank in range(2))
    stopped.look()
    for _ in range(5):
        other.look()
    for _ in range(2):
        stopped.look()
    with pytest.raises(RankMismatchError, match=r"wait for each other, rank 0 does 0, rank 1 does"):
        other.look()


def test_a_broken_connection_is_said_without_the_wishes_of_gloo() -> None:
    quiet = FailureBoard.__new__(FailureBoard)
    quiet.kind, quiet.raise_if_failed = "group", lambda: (_ for _ in ()).throw(RuntimeError)  # type: ignore[method-assign]
    text = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:11171. This is typically caused by a remote worker crashing. GLHF!"
    )
    assert str(quiet.lost(RuntimeError(text))).endswith(
        "was destroyed (Connection closed by peer [127.0.0.1]:11171)"
    )
