"""Numbers that a forward computes with and changes where no program can follow."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

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
    with pytest.warns(UserWarning, match=f"numbers outside of the model.*{said}"):
        module(torch.randn(2, WIDTH))


class Table(nn.Module):
    """A table of the largest length so far, as of rotary embeddings that scale with it."""

    table: Tensor
    length: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.length = 4

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        if length > self.length:
            self.table, self.length = self.table * length, torch.tensor(length)
        elif length < 4 and self.length > 4:
            self.table, self.length = torch.ones(WIDTH), 4
        return self.linear(x) * self.table


def test_a_buffer_stays_with_an_attribute_that_stays() -> None:
    """Written, it would be that of a length that the module does not know."""
    eager = Table()
    module = compiled(lambda: copy.deepcopy(eager))

    def compare(rows: int) -> None:
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(module(x), eager(x))

    compare(3)
    with pytest.warns(UserWarning, match=r"length \(4 -> a tensor\).*table"):
        compare(6)
    compare(3)
    assert torch.equal(module.table, torch.ones(WIDTH))


def test_a_class_whose_file_was_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "not_imported.py"
    path.write_text("from torch import nn\n\nclass Model(nn.Linear):\n    calls = 0\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    module, x = compiled(lambda: file.Model(WIDTH, WIDTH)), torch.randn(2, WIDTH)
    assert module(x).shape == x.shape
