"""Counts of a forward by ``torch.bincount``, whose size numbers tell where no other is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers import parity


class Balanced(nn.Module):
    """The loss that keeps a router from sending all tokens to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor, length: int = 4) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        ids = probabilities.topk(2, -1).indices.flatten()
        counts = torch.bincount(ids, minlength=length)
        assert counts.dtype == torch.int64
        return (counts[:4] / ids.bincount(minlength=4).sum() * probabilities).mean()


@pytest.mark.parametrize("tp", [1, 2])
def test_counts_have_the_size_that_was_asked_for(tp: int) -> None:
    torch.manual_seed(0)
    model, x = Balanced().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    case = parity.make_case(model, {"x": x})
    parity.assert_parity(case, tp=tp)
    model(x).backward()
    true = {key: value.grad for key, value in model.named_parameters()}
    assert parity.gradient_error(case.grads, true) < 1e-14


def test_counts_of_larger_numbers_raise() -> None:
    """Their result would be longer than the program has it."""
    model, x = Balanced().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    captured = capture(model, (x, 1)).module
    with pytest.raises(IndexError, match="out of range"):
        captured(*model.parameters(), x)


@pytest.mark.parametrize("length", [0, 4])
def test_counts_whose_size_numbers_tell_are_refused(length: int) -> None:
    """As are those of rows that numbers choose."""

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ids = super().forward(x).argmax(-1).flatten()
            chosen = ids[ids > 0] if length else ids
            return torch.bincount(chosen, minlength=length).max()

    with pytest.raises(CaptureError, match=r"(depends on|selected by) the values"):
        capture(Counted(8, 4), (torch.randn(2, 4, 8),))
