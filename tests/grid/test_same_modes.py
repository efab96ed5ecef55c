"""Ranks with different data change between training and evaluation together, or all raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sp_compiler
from sp_compiler import RankFailureError, RankMismatchError
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import batch


def _compiled(axis: str) -> tuple[Any, torch.Tensor, int]:
    mesh = grids.mesh(**{axis: 2, "tp": 1})
    part, parts = sp_compiler.data_shard(mesh)
    x = batch().chunk(parts)[part]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8).double() for _ in range(3)))
    return sp_compiler.compile(model, mesh=mesh, example_inputs=((x,), {})), x, part


def _train(module: Any, x: torch.Tensor) -> None:
    module.train()(x).square().mean().backward()


def _evaluate(module: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.eval()(x)


def _alone_where_nothing_is_gathered() -> None:
    module, x, part = _compiled("dp_replicate")
    _train(module, x)
    if part == 0:
        _evaluate(module, x)
    _train(module, x)
    gradients = [grids.whole(parameter.grad) for parameter in module.parameters()]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def _in_other_modes_at_once() -> None:
    """The error leaves the group usable: no rank has begun anything."""
    module, x, part = _compiled("dp_shard")
    _train(module, x)
    _evaluate(module, x)
    _train(module, x)
    modes = r"rank 0 in eval\(\), without gradients, rank 1 in eval\(\), recording gradients"
    with pytest.raises(RankMismatchError, match=modes), torch.set_grad_enabled(part == 1):
        module.eval()(x)
    _evaluate(module, x)
    _train(module, x)


def _alone_where_parameters_are_gathered() -> None:
    module, x, part = _compiled("dp_shard")
    _train(module, x)
    wait = r"rank 0 calls the module in eval\(\), without gradients, rank 1 waits for parameters"
    # The first rank to notice raises the one error, and may tell the other before it looks.
    with pytest.raises((RankMismatchError, RankFailureError), match=wait):
        (_evaluate if part == 0 else _train)(module, x)


def _modes() -> None:
    _alone_where_nothing_is_gathered()
    _in_other_modes_at_once()
    _alone_where_parameters_are_gathered()  # last: its group cannot continue


@pytest.mark.slow
def test_modes_of_parts_of_the_data() -> None:
    run_on_ranks(2, _modes)
