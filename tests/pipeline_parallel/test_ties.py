"""Gradients of parameters that ranks of a pipeline share, summed over those that hold them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.pipeline_parallel.axes import pipeline_axis
from sp_compiler.pipeline_parallel.ties import TiedParameters
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks

_HOLDERS = {
    "adjacent": frozenset({0, 1}),
    "ends": frozenset({0, 2}),
    "all": frozenset({0, 1, 2}),
    "own": frozenset({1}),
}


def _summed() -> dict[str, Tensor]:
    """``grad`` of each parameter of this rank behind two steps, of gradients 10 ** rank."""
    axis = pipeline_axis(grids.mesh(pp=3), timedelta(seconds=60))
    ties = TiedParameters(_HOLDERS, axis)
    own = {
        name: nn.Parameter(torch.zeros(2)) for name, ranks in _HOLDERS.items() if axis.rank in ranks
    }
    for _ in range(2):
        earlier = ties.before(own)
        for name, parameter in own.items():
            # One stage does not use what it holds.
            if (name, axis.rank) != ("all", 1):
                grad = torch.full((2,), 10.0**axis.rank)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        ties.after(own, earlier)
    return {name: parameter.grad for name, parameter in own.items() if parameter.grad is not None}


@pytest.mark.slow
def test_ranks_that_hold_different_parameters_sum_each_over_its_holders() -> None:
    expected = {"adjacent": 22.0, "ends": 202.0, "all": 202.0, "own": 20.0}
    for rank, found in enumerate(run_on_ranks(3, _summed)):
        assert {name: grad.tolist() for name, grad in found.items()} == {
            name: [total, total] for name, total in expected.items() if rank in _HOLDERS[name]
        }
