"""The exact program means what the schedule's clock and memory do."""

from __future__ import annotations

from benchmarks.exact_schedule import exact_schedule
from sp_compiler.solve.block_schedule import simulate
from sp_compiler.solve.schedule_bound import least_us
from tests.solve.test_list_schedule import (
    brute_force_us,
    exact_order,
    limits,
    random_block,
    with_blocking_collective,
    with_scratch_of_waits,
)


def test_the_exact_schedule_is_the_best_of_all_orders() -> None:
    for seed in range(20):
        block = with_blocking_collective(with_scratch_of_waits(random_block(seed, 4), seed))
        for limit in limits(block):
            order = exact_order(block, limit)
            assert simulate(block, order).time_us == brute_force_us(block, limit), seed


def test_an_exact_schedule_without_time_proves_nothing() -> None:
    block = random_block(4, 11)
    tight, _ = limits(block)
    given = range(len(block.tasks))
    assert simulate(block, given).time_us > least_us(block)
    found = exact_schedule(block, tight, given, seconds=0)
    assert found.order == [*given]
    assert not found.proven
    assert found.least_us == least_us(block)
