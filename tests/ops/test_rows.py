"""Rows of tokens that do not divide by the number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_compiler.base.placement import P, Placement, R
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Operator
from sp_compiler.ops.rows import CUT_ROWS, PAD_ROWS, PAD_ROWS_WITH_ZEROS, pad_rows
from tests.helpers.own_operators import Case, assert_registered, assert_right

_X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _missing(world_size: int) -> int:
    return -5 % world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placement", [R, P], ids=str)
def test_pad_rows(placement: Placement, world_size: int) -> None:
    def dense(x: Tensor) -> Tensor:  # no gradient flows from the copies
        return torch.cat([x, *[x[-1:].detach()] * _missing(world_size)])

    # An incoming gradient of the padding would be cut off.
    case = Case(PAD_ROWS, dense, [_X], (world_size,), (placement,), (placement,))
    assert_right(case, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placement", [R, P], ids=str)
def test_pad_rows_with_zeros(placement: Placement, world_size: int) -> None:
    def dense(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(_missing(world_size), 3)])

    case = Case(PAD_ROWS_WITH_ZEROS, dense, [_X], (world_size,), (placement,), (placement,))
    assert_right(case, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placement", [R, P], ids=str)
def test_cut_rows(placement: Placement, world_size: int) -> None:
    padded = torch.cat([_X, _X.new_ones(_missing(world_size), 3)])
    case = Case(
        CUT_ROWS, lambda x: x[:5] * 1, [padded], (5, world_size), (placement,), (placement,)
    )
    assert_right(case, world_size)


@pytest.mark.parametrize(
    ("operator", "rest"), [(PAD_ROWS, (1,)), (PAD_ROWS_WITH_ZEROS, (1,)), (CUT_ROWS, (5, 1))]
)
def test_registered(operator: Operator, rest: tuple[int, ...]) -> None:
    x = _X.clone().requires_grad_(operator.gradient is not None)
    assert_registered(operator, x, *rest)


def test_rows_that_divide_are_not_copied() -> None:
    assert pad_rows(Communicator(None, 0, 5), _X) is _X
