"""Orders in which single tasks were moved: valid, below the limit of memory, and shorter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sp_compiler.solve.block_schedule import Block, Task, is_valid, peak_bytes, simulate
from sp_compiler.solve.list_schedule import ListSchedule, list_schedule
from sp_compiler.solve.order_search import improved
from sp_compiler.solve.schedule_walk import SLOW_LINK, cost_us
from tests.solve.test_list_schedule import (
    brute_force_us,
    limits,
    random_block,
    with_blocking_collective,
)


def order_cost_us(block: Block, order: list[int]) -> float:
    """What orders are compared by."""
    times_us = (simulate(block, order, factor).time_us for factor in (1.0, SLOW_LINK))
    return cost_us(*times_us)


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


def test_of_two_orders_that_take_as_long_the_one_for_a_slower_link_is_better() -> None:
    start, wait, first, last, other = range(5)
    block = Block(
        (
            Task(link_us=2.0),
            Task(needs=(start,), waits_for=start),
            Task(time_us=2.0),
            Task(needs=(wait,), time_us=1.0),
            Task(time_us=2.0),
        )
    )
    early = [start, first, wait, last, other]
    order = improved(block, 0, [early], 0.0, 10_000)
    assert simulate(block, order).time_us == simulate(block, early).time_us == 5.0
    assert simulate(block, early, SLOW_LINK).time_us == 7.0
    assert simulate(block, order, SLOW_LINK).time_us == 5.0


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
    moved_us = [thorough_us(block, 0) for block in blocks]
    monkeypatch.setattr(
        "sp_compiler.solve.list_schedule.improved", lambda block, limit, known, *_: [*known[0]]
    )
    walked_us = [thorough_us(block, 0) for block in blocks]
    pairs = list(zip(moved_us, walked_us, strict=True))
    assert all(moved <= walked for moved, walked in pairs)
    assert sum(moved < walked for moved, walked in pairs) >= 4


def thorough_us(block: Block, limit_bytes: int) -> float:
    """Time of the order that would run."""
    return simulate(block, ListSchedule(block).order(limit_bytes, thorough=True)).time_us


def test_the_given_order_is_a_second_start_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the moves end in counts only if it is shorter than the walk."""
    starts: list[list[int]] = []

    def recorded(block: Block, limit: int, known: list[Any], *_: object) -> list[int]:
        assert all(peak_bytes(block, order) <= limit for order in known)
        starts[:] = map(list, known)
        return [*range(len(block.tasks))]

    monkeypatch.setattr("sp_compiler.solve.list_schedule.improved", recorded)
    counts = []
    for seed in range(40):
        block = random_block(seed, 12)
        given, search = [*range(len(block.tasks))], ListSchedule(block)
        least, free = limits(block)
        for limit in (free, 0):
            order = search.order(limit, thorough=True)
            assert simulate(block, order).time_us <= simulate(block, search.order(limit)).time_us
            fits = peak_bytes(block, search.order(limit)) >= least or limit >= least
            assert starts[1:] == ([given] if fits else [])
            counts.append(len(starts))
    assert {*counts} == {1, 2}


def test_the_same_orders_are_improved_in_the_same_way() -> None:
    first, second = random_block(3, 30), random_block(3, 30)
    given = range(len(first.tasks))
    assert improved(first, 60, [given], 0.0, 20_000) == improved(second, 60, [given], 0.0, 20_000)
