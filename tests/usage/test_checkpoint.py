"""Gradient checkpointing outside of the module, and flags for it on the model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sp_compiler
from tests.helpers.slow import slow
from tests.helpers.users import assert_same_gradients, batch, compiled, gradients, net
from tests.models import zoo


def _y(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x)["y"]
    return y


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("p", [slow(0.0), 0.4])
def test_an_outer_checkpoint_gives_the_same_gradients(use_reentrant: bool, p: float) -> None:
    """The re-run draws the same masks: torch restores its CPU generator, which seeds them."""
    found = []
    module = compiled(lambda: net(p))
    for checkpointed in (False, True):
        module.zero_grad()
        torch.manual_seed(3)
        x = batch().requires_grad_()
        y = (
            checkpoint(_y, module, x, use_reentrant=use_reentrant)
            if checkpointed
            else _y(module, x)
        )
        torch.rand(2)
        y.square().sum().backward()
        found.append({**{k: g.clone() for k, g in gradients(module).items()}, "x": x.grad})
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


def _set_flag(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of several names for it, all but the newest warn
        model.gradient_checkpointing_enable()


@pytest.mark.slow
def test_flags_on_the_model_are_ignored_and_said_once() -> None:
    model = zoo.build("gpt2", layers=1)
    _set_flag(model)
    module: Any = sp_compiler.compile(model, tp=1)
    inputs = zoo.inputs("gpt2")
    with pytest.warns(UserWarning, match="recompute= of sp_compiler governs"):
        module(**inputs).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.eval()(**inputs)  # which is compiled too
    true = zoo.build("gpt2", layers=1)
    true(**inputs).loss.backward()
    assert_same_gradients(module, true, 1e-5)


def test_the_flag_may_be_set_after_compilation() -> None:
    module: Any = sp_compiler.compile(zoo.build("gpt2", layers=1), tp=1)
    _set_flag(module)
    with pytest.warns(UserWarning, match="recompute= of sp_compiler governs"):
        module(**zoo.inputs("gpt2")).loss.backward()
