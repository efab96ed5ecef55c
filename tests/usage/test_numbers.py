"""Numbers that a forward computes with and changes where no program can follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.users import compiled

WIDTH = 8
STEP = 0


class Counting(nn.Module):
    """Computes with a number that it changes in a dict, in place or in a new one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.numbers, self.in_place = {"calls": 0, "limit": 9}, in_place

    def forward(self, x: Tensor) -> Tensor:
        calls = self.numbers["calls"] + 1
        if self.in_place:
            self.numbers["calls"] = calls
        else:
            self.numbers = {**self.numbers, "calls": calls}
        return self.linear(x) * calls


@pytest.mark.parametrize("in_place", [True, False])
def test_a_number_that_is_read_in_a_dict_and_changed_there_is_named(in_place: bool) -> None:
    module = compiled(lambda: Counting(in_place))
    with pytest.warns(UserWarning, match=r"numbers \(dict of 2 -> dict of 2\)"):
        module(torch.randn(2, WIDTH))
    assert module.numbers == {"calls": 0, "limit": 9}


class Outside(nn.Module):
    """Computes with a global that it counts, and with an attribute of its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        global STEP
        STEP += 1
        Outside.calls += 1
        return self.linear(x) * STEP * Outside.calls


def test_numbers_outside_of_the_model_are_named() -> None:
    module = compiled(Outside)
    said = r"Outside\.calls \(0 -> 1\), global tests\.usage\.test_numbers\.STEP \(0 -> 1\)"
    with pytest.warns(UserWarning, match=said):
        module(torch.randn(2, WIDTH))
