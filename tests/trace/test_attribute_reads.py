"""Which attributes of a model's modules count as read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from sp_compiler.trace.attributes.reads import recorded_attributes


class Own(nn.Module):
    """Finds its attributes past all others."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def test_names_are_recorded_by_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with recorded_attributes(model) as reads:
        hasattr(model[0], "absent")
        model[1].written = 1
        vars(nn.Module())  # of no module of the model
    first, second = reads.of(model[0]), reads.of(model[1])
    assert first is not None
    assert second is not None
    assert "absent" in first - second
    assert "written" in second - first


@pytest.mark.parametrize("look", [vars, dir, copy.copy, lambda module: module.__dict__["training"]])
def test_whoever_looks_at_all_attributes_may_have_read_any(look: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with recorded_attributes(model) as reads:
        look(model[0])
        model.state_dict()
        model.named_parameters()
    assert reads.of(model[0]) is None
    assert reads.of(model[1]) is not None


def test_a_class_with_a_way_of_its_own_may_read_any() -> None:
    model = nn.Sequential(Own())
    with recorded_attributes(model) as reads:
        pass
    assert reads.of(model[0]) is None


def test_torch_is_as_before_afterwards() -> None:
    before = dict(vars(nn.Module))
    with pytest.raises(ValueError, match="mistake"), recorded_attributes(nn.Linear(2, 2)):
        raise ValueError("mistake")
    assert dict(vars(nn.Module)) == before
