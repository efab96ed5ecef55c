"""The garbage collector inside of a compilation and behind it."""

from __future__ import annotations

import gc
import weakref

import pytest

from sp_compiler.base.collector import older_objects_skipped


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("nothing_frozen")
def test_only_objects_of_the_context_are_collected() -> None:
    older = _Cycle()
    older_gone = weakref.ref(older)
    with older_objects_skipped():
        del older
        newer_gone = weakref.ref(_Cycle())
        gc.collect()
        assert newer_gone() is None
        assert older_gone() is not None
        with older_objects_skipped():
            pass
        assert gc.get_freeze_count(), "the inner context ended the outer one"
    assert not gc.get_freeze_count()
    gc.collect()
    assert older_gone() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_user_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with older_objects_skipped():
        pass
    assert gc.get_freeze_count()
