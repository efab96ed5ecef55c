"""Orders in which single tasks were moved: valid, below the limit of memory, and shorter."""

from __future__ import annotations

import random

import pytest

from sp_compiler.solve.block_schedule import Block, Task, is_valid, peak_bytes, simulate
from sp_compiler.solve.list_schedule import ListSchedule, list_schedule
from sp_compiler.solve.order_search import improved
from sp_compiler.solve.schedule_walk import SLOW_LINK, cost_us
from tests.solve.test_list_schedule import brute_force_us, limits, random_block


def order_cost_us(block: Block, order: list[int]) -> float:
    """What orders are compared by."""
    times_us = (simulate(block, order, factor).time_us for factor in (1.0, SLOW_LINK))
    return cost_us(*times_us)


def with_blocking_collective(block: Block) -> Block:
    """Nobody waits for one more collective: the compute stream does where it starts."""
    return Block(
        (*block.tasks, Task(time_us=2.0, link_us=3.0)), block.storage_bytes, block.returned
    )


@pytest.mark.parametrize("memory", ["tight", "free"])
def test_an_order_that_was_improved_is_valid_and_fits(memory: str) -> None:
    shorter = 0
    for seed in range(40):
        block = with_blocking_collective(random_block(seed, 16))
        limit, given = limits(block)[memory == "free"], list(range(len(block.tasks)))
        order = improved(block, limit, [given], 0.0, 4_000)
        assert is_valid(block, order)
        assert peak_bytes(block, order) <= limit, seed
        assert order_cost_us(block, order) <= order_cost_us(block, given)
        shorter += simulate(block, order).time_us < simulate(block, given).time_us
    assert shorter > 30


def test_the_search_ends_at_the_shortest_of_all_orders() -> None:
    """It would go on if its clock were not that of the schedule."""
    for seed in range(30):
        block = with_blocking_collective(random_block(seed, 4))
        _, free = limits(block)
        least_us = brute_force_us(block, free)
        order = improved(block, free, [range(len(block.tasks))], least_us, 1_000_000)
        assert simulate(block, order).time_us == least_us, seed
        # The first of the orders that is short enough, before any task is moved.
        assert improved(block, free, [order, order[::-1]], least_us, 1_000_000) == order


def test_the_best_of_several_orders_is_improved() -> None:
    block = random_block(1, 16)
    _, free = limits(block)
    poor, good = list(range(len(block.tasks))), list_schedule(block, free)
    assert order_cost_us(block, good) < order_cost_us(block, poor)
    for orders in ([poor, good], [good, poor]):
        assert improved(block, free, orders, 0.0, 0) == good


def backward_of_layer(seed: int) -> Block:
    """A chain of kernels and collectives, with weight gradients to hide them."""
    draw, tasks = random.Random(seed), list[Task]()
    arrived: tuple[int, ...] = ()
    for _ in range(12):
        kernel, start, wait = range(len(tasks), len(tasks) + 3)
        tasks.append(Task(needs=arrived, time_us=float(draw.randrange(1, 6))))
        tasks.append(Task(needs=(kernel,), link_us=float(draw.randrange(4, 13))))
        tasks.append(Task(needs=(start,), waits_for=start))
        arrived = (wait,)
        for _ in range(draw.randrange(3)):
            tasks.append(Task(needs=arrived, time_us=float(draw.randrange(1, 16))))
    return Block(tuple(tasks))


def test_moves_find_orders_that_no_walk_does(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [backward_of_layer(seed) for seed in range(10)]

    def times_us() -> list[float]:
        orders = [ListSchedule(block).order(0, thorough=True) for block in blocks]
        return [simulate(*each).time_us for each in zip(blocks, orders, strict=True)]

    moved_us = times_us()
    monkeypatch.setattr(
        "sp_compiler.solve.list_schedule.improved", lambda block, limit, known, *_: [*known[0]]
    )
    pairs = list(zip(moved_us, times_us(), strict=True))
    assert all(moved <= walked for moved, walked in pairs)
    assert sum(moved < walked for moved, walked in pairs) >= 4


def test_the_same_orders_are_improved_in_the_same_way() -> None:
    first, second = random_block(3, 30), random_block(3, 30)
    given = range(len(first.tasks))
    assert improved(first, 60, [given], 0.0, 20_000) == improved(second, 60, [given], 0.0, 20_000)
