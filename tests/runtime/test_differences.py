"""What differs between two calls, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sp_compiler.runtime.keys.call_key import CallKey, call_key
from sp_compiler.runtime.keys.differences import differences


def _key(model: nn.Module) -> CallKey:
    return call_key(model.modules(), model.parameters(), model.buffers(), [], None)


def _freeze_all_but_last(model: nn.Sequential) -> None:
    model[:-1].requires_grad_(False)


def _freeze_one(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.eval(), ["eval()"]),
        (lambda model: model[0].eval(), ["eval() of 0 alone"]),
        (lambda model: model.requires_grad_(False), ["requires_grad of no parameter"]),
        (_freeze_all_but_last, ["requires_grad of 3.weight, 3.bias alone"]),
        (_freeze_one, ["requires_grad of all parameters but 0.weight"]),
        (lambda model: model.half(), ["dtype float16 of all parameters"]),
        (lambda model: model[:2].half(), ["dtypes of 0.weight, 0.bias, 1.weight and 1 more"]),
    ],
)
def test_modules_and_parameters_are_named(
    change: Callable[[nn.Sequential], object], said: list[str]
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    before = _key(model)
    change(model)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert differences(before, _key(model), modules, parameters, [], str) == said


def test_autocast_is_named() -> None:
    model = nn.Linear(2, 2)
    plain = _key(model)
    with torch.autocast("cpu", torch.bfloat16):
        cast = _key(model)
    assert differences(plain, cast, [""], ["weight", "bias"], [], str) == ["autocast cpu bfloat16"]
    assert differences(cast, plain, [""], ["weight", "bias"], [], str) == ["no autocast"]


def test_a_default_dtype_is_named() -> None:
    before = _key(nn.Linear(2, 2))
    now = dataclasses.replace(before, default_dtype=torch.float64)
    assert differences(before, now, [""], ["weight", "bias"], [], str) == ["default dtype float64"]
