"""Several results put together in place, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.check.derive import declared_strategies
from sp_compiler.cost.hardware import H100, kernel_us
from sp_compiler.cost.node_cost import compute_us, node_flops
from sp_compiler.ops.accumulate import (
    ADD_PART,
    ADD_PRODUCT,
    WRITE_ROWS,
    add_part,
    add_product,
    write_rows,
)
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Operator
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "placements", [(R, R, R, R), (S(0), S(0), R, S(0)), (S(1), R, S(1), S(1)), (P, S(1), S(0), P)]
)
def test_add_product(placements: tuple[Placement, ...], world_size: int) -> None:
    *operands, result = placements
    inputs = [_random(8, 4), _random(8, 12), _random(12, 4)]
    case = Case(ADD_PRODUCT, torch.addmm, inputs, (world_size,), tuple(operands), (result,))
    assert_right(case, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placement", [R, P, S(1)], ids=str)
def test_write_rows(placement: Placement, world_size: int) -> None:
    def dense(total: Tensor, part: Tensor) -> Tensor:
        return torch.cat([total[:2], part, total[5:]])

    inputs = [_random(7, 4), _random(3, 4)]
    rest = (0, 2, world_size)
    case = Case(WRITE_ROWS, dense, inputs, rest, (placement, placement), (placement,))
    assert_right(case, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placement", [R, P, S(0), S(1)], ids=str)
def test_add_part(placement: Placement, world_size: int) -> None:
    inputs = [_random(8, 4), _random(8, 4)]
    placements = (placement, placement)
    case = Case(ADD_PART, torch.add, inputs, (world_size,), placements, (placement,))
    assert_right(case, world_size)


def test_time_of_what_is_added_in_place() -> None:
    """The total is read and written, whatever else is read."""
    product, part = (
        node_of(ADD_PRODUCT, [_random(8, 4), _random(8, 6), _random(6, 4)], (2,)),
        node_of(ADD_PART, [_random(8, 4), _random(8, 4)], (2,)),
    )
    total_bytes = 8 * 8 * 4
    flops = 2 * 8 * 6 * 4
    assert node_flops(product) == (flops, flops)
    for node, num_bytes in (
        (product, 2 * total_bytes + 8 * (8 * 6 + 6 * 4)),
        (part, 3 * total_bytes),
    ):
        expected_us = kernel_us(node_flops(node)[1], num_bytes, torch.float64, H100)
        assert compute_us(node, H100) == expected_us > 0


def test_rows_of_one_part_are_not_written_into_another() -> None:
    node = node_of(WRITE_ROWS, [_random(7, 4), _random(3, 4)], (0, 2, 2))
    ways = declared_strategies(node, 2) or ()
    assert [way.operands[0] for way in ways] == [R, P, S(1)]


@pytest.mark.parametrize(
    ("operator", "shapes", "rest"),
    [
        (ADD_PRODUCT, [(5, 3), (5, 4), (4, 3)], (1,)),
        (ADD_PART, [(5, 3), (5, 3)], (1,)),
        (WRITE_ROWS, [(5, 3), (2, 3)], (0, 3, 1)),
    ],
)
def test_registered(
    operator: Operator, shapes: list[tuple[int, int]], rest: tuple[int, ...]
) -> None:
    assert_registered(operator, *(_random(*shape) for shape in shapes), *rest)


def test_the_kernels_write_in_place() -> None:
    tp, total = Communicator(None, 0, 1), torch.zeros(4, 2)
    for kernel, args in ((add_product, (torch.ones(4, 3), torch.ones(3, 2))), (write_rows, ())):
        part = args or (torch.ones(1, 2), 0, 3)
        assert kernel(tp, total, *part).data_ptr() == total.data_ptr()
    assert add_part(tp, total, torch.ones(4, 2)).data_ptr() == total.data_ptr()
    assert total.tolist() == [[4, 4], [4, 4], [4, 4], [2, 2]]
