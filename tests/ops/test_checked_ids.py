"""Ids that a lookup or a loss is given, looked at in front of it."""

from __future__ import annotations

import pytest
import torch

from sp_compiler.base.placement import Placement, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu.checked_ids import CHECKED_IDS, checked_ids
from tests.helpers.own_operators import Case, assert_registered, assert_right

_IGNORED = -100
_IDS = torch.tensor([[0, 6, 3, 1], [2, _IGNORED, 5, 4]])
_WHAT = "a table of {} rows"


@pytest.mark.parametrize("placement", [R, S(0), S(1)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ids_in_range_are_handed_on(placement: Placement, world_size: int) -> None:
    rest = (7, _IGNORED, _WHAT, world_size)
    case = Case(CHECKED_IDS, torch.clone, [_IDS], rest, (placement,), (placement,))
    assert_right(case, world_size)


def test_registered() -> None:
    assert_registered(CHECKED_IDS, _IDS, 7, _IGNORED, _WHAT, 1)
    assert_registered(CHECKED_IDS, torch.zeros(2, dtype=torch.int32), 7, None, _WHAT, 1)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_on_the_host_a_wrong_id_is_an_error_at_once(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"^index {wrong} is out of range for a table of 7 rows$"):
        checked_ids(Communicator(None, 0, 1), torch.tensor([3, wrong]), 7, _IGNORED, _WHAT, 1)
    with pytest.raises(IndexError, match=f"index {_IGNORED} is out of range"):
        checked_ids(Communicator(None, 0, 1), _IDS, 7, None, _WHAT, 1)


def test_on_a_device_ids_are_noted_and_not_read() -> None:
    """Reading a number of "meta" raises, as it would wait on a GPU."""
    tp = Communicator(None, 0, 1)
    tp.id_checks.settle()
    ids = torch.empty(2, 3, dtype=torch.int32, device="meta")
    assert checked_ids(tp, ids, 5, None, _WHAT, 1).dtype == torch.int32
    assert not checked_ids(tp, ids[:0], 5, None, _WHAT, 1).numel()
    (noted,) = tp.id_checks._noted
    assert (noted.size, noted.bounds.shape, noted.bounds.device.type) == (5, (2,), "meta")


def test_on_a_device_a_backward_that_recomputes_notes_nothing() -> None:
    """Its notes would come with the next forward's, and a wrong id be told twice."""
    tp = Communicator(None, 0, 1)
    ids = torch.empty(2, 3, dtype=torch.int64, device="meta")
    with tp.id_checks.collected() as noted:
        tp.id_checks.settle()
        checked_ids(tp, ids, 5, None, _WHAT, 1)
        tp.id_checks.send()
        checked_ids(tp, ids, 5, None, _WHAT, 1)
    assert len(noted) == 1


def test_what_the_lookup_gets_is_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the error comes late, and until then nothing may be read outside of a table."""
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "sp_compiler.ops.vocabulary.require_in_range",
        lambda low, high, *rest: noted.append((low, high)),
    )
    ids = torch.tensor([[-3, 9], [_IGNORED, 6]], dtype=torch.int32)
    inside = checked_ids(Communicator(None, 0, 1), ids, 7, _IGNORED, _WHAT, 1)
    assert inside.tolist() == [[0, 6], [_IGNORED, 6]]
    assert noted == [(-3, 9)]
