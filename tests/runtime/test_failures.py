"""Errors that count as the failure of a rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_compiler.runtime.failures.board import FailureBoard


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    errors: list[BaseException] = []
    monkeypatch.setattr(FailureBoard, "report", lambda board, error: errors.append(error))
    return errors


def test_the_early_end_of_a_checkpoint_is_no_failure(reported: list[BaseException]) -> None:
    board = FailureBoard.__new__(FailureBoard)

    def call(x: Tensor) -> Tensor:
        with board.reporting():
            return x.sin().exp() + 1

    x = torch.randn(3, requires_grad=True)
    checkpoint(call, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert not reported


def test_an_error_is_a_failure(reported: list[BaseException]) -> None:
    board = FailureBoard.__new__(FailureBoard)
    with pytest.raises(ZeroDivisionError), board.reporting():
        raise ZeroDivisionError
    assert [type(error) for error in reported] == [ZeroDivisionError]
