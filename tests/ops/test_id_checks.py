"""Ids out of range on a device, told one call later."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_compiler.ops.gpu import id_checks
from sp_compiler.ops.gpu.host_copy import HostCopy
from sp_compiler.ops.gpu.id_checks import IdBounds, IdChecks


def _bounds(low: int, high: int) -> IdBounds:
    return IdBounds(torch.tensor([low, high]), 10, "an embedding of {} rows")


@pytest.mark.parametrize(("low", "high", "wrong"), [(-1, 3, "-1"), (0, 10, "10"), (2, 99, "99")])
def test_the_id_is_named_at_the_next_call(low: int, high: int, wrong: str) -> None:
    checks = IdChecks()
    checks.note(_bounds(0, 9))
    checks.note(_bounds(low, high))
    checks.send()
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for an embedding of 10 "):
        checks.settle()
    checks.settle()  # told once


def test_without_a_backward_one_call_later_still() -> None:
    checks = IdChecks()
    with torch.no_grad():
        checks.note(_bounds(0, 10))
        checks.send()
        checks.settle()
        checks.note(_bounds(0, 9))
        checks.send()
    with pytest.raises(IndexError, match="index 10 is out of range"):
        checks.settle()


def test_ids_of_a_forward_that_failed_are_not_told_with_those_of_the_next() -> None:
    checks = IdChecks()
    checks.settle()
    checks.note(_bounds(0, 10))
    checks.settle()
    checks.note(_bounds(0, 9))
    checks.send()
    checks.settle()


def test_what_was_sent_is_not_kept_on_the_device() -> None:
    checks = IdChecks()
    bounds = _bounds(0, 9)
    kept = weakref.ref(bounds.bounds)
    checks.note(bounds)
    del bounds
    checks.send()
    assert kept() is None
    checks.settle()


def test_a_graph_of_the_user_has_no_part_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends a recording where it waits, and is not there when that is replayed."""
    checks = IdChecks()
    checks.note(_bounds(0, 10))
    checks.send()
    with monkeypatch.context() as patch:
        patch.setattr(id_checks, "is_recorded", lambda device: True)
        patch.setattr(id_checks, "HostCopy", None)
        patch.setattr(torch, "stack", None)  # which only the copy needs
        checks.settle()
        checks.note(_bounds(0, 11))
        checks.send()
    with pytest.raises(IndexError, match="index 10 is out of range"):
        checks.settle()
    checks.settle()


def test_what_is_recorded_is_checked_with_each_replay() -> None:
    checks = IdChecks()
    with checks.collected() as noted:
        checks.note(_bounds(0, 0))
        checks.send()
        checks.settle()
    checks.settle()
    noted[0].bounds.copy_(torch.tensor([0, 11]))
    checks.note(noted[0])
    checks.send()
    with pytest.raises(IndexError, match="index 11"):
        checks.settle()


def test_a_copy_has_arrived_when_the_device_of_the_value_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when the current device is, which has nothing to do."""
    device = torch.device("cuda", 1)
    done: list[torch.device] = []

    def stream(device: torch.device) -> Any:
        event = SimpleNamespace(query=lambda: device in done)
        return SimpleNamespace(record_event=lambda: event)

    on_host = SimpleNamespace(copy_=lambda value, non_blocking: None)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: on_host)
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    copy = HostCopy(SimpleNamespace(device=device))  # type: ignore[arg-type]  # stands for one
    done.append(torch.device("cuda", 0))
    assert not copy.has_arrived()
    done.append(device)
    assert copy.has_arrived()
