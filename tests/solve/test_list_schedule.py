"""The schedule of a block: valid, below its limit of memory, and as short as any order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import networkx
import pytest

from benchmarks.exact_schedule import exact_schedule
from sp_compiler.solve.block_schedule import (
    Block,
    Clock,
    Memory,
    Task,
    is_valid,
    most_beside,
    peak_bytes,
    simulate,
)
from sp_compiler.solve.list_schedule import ListSchedule, list_schedule
from sp_compiler.solve.schedule_bound import least_us
from sp_compiler.solve.schedule_walk import Fitting, Priorities, Walked, walked


def random_block(seed: int, num_nodes: int) -> Block:
    """Kernels and collectives that each read up to two earlier results."""
    draw = random.Random(seed)
    tasks: list[Task] = []
    result_of: list[int] = []  # by storage, the task behind which it can be read
    sizes: list[int] = []
    for storage in range(num_nodes):
        reads = draw.sample(range(storage), min(storage, draw.randrange(3)))
        needs = tuple(result_of[read] for read in reads)
        sizes.append(draw.randrange(1, 9))
        sent = draw.random() < 0.35
        tasks.append(
            Task(
                needs=needs,
                time_us=0.0 if sent else float(draw.randrange(1, 6)),
                link_us=float(draw.randrange(1, 8)) if sent else 0.0,
                makes=(storage,),
                reads=tuple(reads),
                run_bytes=sizes[storage] + draw.randrange(2),
            )
        )
        if sent:
            position = len(tasks) - 1
            tasks.append(Task(needs=(position,), waits_for=position, reads=tuple(reads)))
        result_of.append(len(tasks) - 1)
    return Block(tuple(tasks), tuple(sizes), frozenset({num_nodes - 1}))


def with_scratch_of_waits(block: Block, seed: int) -> Block:
    """What arrives is copied, as parts that are no rows are."""
    draw = random.Random(seed)
    tasks = tuple(
        each if each.waits_for is None else replace(each, run_bytes=draw.randrange(1, 12))
        for each in block.tasks
    )
    return replace(block, tasks=tasks)


def orders(block: Block) -> list[tuple[int, ...]]:
    """Every order in which the tasks may run."""
    complete: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...]) -> None:
        if len(order) == len(block.tasks):
            complete.append(order)
        for position, task in enumerate(block.tasks):
            if position not in order and set(task.needs) <= set(order):
                extend((*order, position))

    extend(())
    return complete


def brute_force_us(block: Block, limit_bytes: int) -> float:
    """The least time of all orders below the limit."""
    return min(
        simulate(block, order).time_us
        for order in orders(block)
        if peak_bytes(block, order) <= limit_bytes
    )


def exact_order(block: Block, limit_bytes: int) -> list[int]:
    """The order that the exact program finds, proven to be the shortest."""
    found = exact_schedule(
        block, limit_bytes, range(len(block.tasks)), seconds=60, workers=1, ticks_per_us=50
    )
    assert is_valid(block, found.order)
    assert peak_bytes(block, found.order) <= limit_bytes
    time_us = simulate(block, found.order).time_us
    assert time_us - 1 < found.least_us <= time_us  # all times are whole microseconds
    return found.order


def limits(block: Block) -> tuple[int, int]:
    """The least that the given order needs, and more than any needs."""
    return peak_bytes(block, range(len(block.tasks))), sum(block.storage_bytes) * 2


def with_blocking_collective(block: Block) -> Block:
    """Nobody waits for one more collective: the compute stream does where it starts."""
    return replace(block, tasks=(*block.tasks, Task(time_us=2.0, link_us=3.0)))


@pytest.mark.parametrize(
    ("num_nodes", "memory"), [(6, "tight"), (10, "tight"), (6, "free"), (11, "free")]
)
def test_the_list_schedule_is_close_to_the_exact_one(num_nodes: int, memory: str) -> None:
    """In total: of a few tasks, one that is a little late is many percent."""
    total_us = {"list": 0.0, "exact": 0.0}
    for seed in range(20):
        block = random_block(seed, num_nodes)
        limit = limits(block)[memory == "free"]
        order, exact = list_schedule(block, limit), exact_order(block, limit)
        assert is_valid(block, order)
        assert peak_bytes(block, order) <= limit
        total_us["list"] += simulate(block, order).time_us
        total_us["exact"] += simulate(block, exact).time_us
    most = 1.02 if memory == "free" else 1.04
    assert total_us["exact"] <= total_us["list"] <= most * total_us["exact"]


def test_what_arrives_may_need_memory_of_its_own() -> None:
    for seed in range(40):
        block = with_scratch_of_waits(random_block(seed, 16), seed)
        least, _ = limits(block)
        for limit in (least, least + 4, least + 8):
            order = list_schedule(block, limit)
            assert is_valid(block, order)
            assert peak_bytes(block, order) <= limit, seed


def test_no_order_is_shorter_than_the_bound() -> None:
    for seed in range(40):
        block = random_block(seed, 5)
        assert least_us(block) <= brute_force_us(block, limits(block)[1])


@pytest.mark.parametrize("seed", range(20))
def test_kernels_beside_a_collective_neither_lead_to_it_nor_follow_from_it(seed: int) -> None:
    block = random_block(seed, 12)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(block.tasks)))
    for position, task in enumerate(block.tasks):
        graph.add_edges_from((needed, position) for needed in task.needs)
    shares = [0.0]
    for start, wait in block.wait_of.items():
        ordered = networkx.ancestors(graph, start) | networkx.descendants(graph, wait)
        free = [task.time_us for i, task in enumerate(block.tasks) if i not in ordered]
        shares.append(sum(free) / block.tasks[start].link_us)
    assert most_beside(block) == pytest.approx(max(shares))


def test_the_same_block_gets_the_same_order() -> None:
    first, second = random_block(3, 30), random_block(3, 30)
    assert list_schedule(first, 60) == list_schedule(second, 60)


def test_a_thorough_search_goes_on_from_the_order_that_was_compared() -> None:
    shorter = 0
    # In blocks 0 and 15 later waits make up for more than the longer search.
    for seed in range(22):
        block = with_scratch_of_waits(random_block(seed, 12), seed)
        tight, _ = limits(block)
        search = ListSchedule(block)
        orders = [search.order(tight, thorough=thorough) for thorough in (False, True)]
        compared_us, thorough_us = (simulate(block, order).time_us for order in orders)
        assert is_valid(block, orders[1])
        assert peak_bytes(block, orders[1]) <= tight
        assert thorough_us <= compared_us, seed
        shorter += thorough_us < compared_us
    assert shorter >= 5


def test_a_thorough_search_takes_no_more_memory_than_a_budget_counted_on() -> None:
    """The order that was compared may take less than the given one, whose peak is the limit."""
    less = 0
    for seed in range(24):
        block = random_block(seed, 12)
        search = ListSchedule(block)
        peaks = [peak_bytes(block, search.order(0, thorough=each)) for each in (False, True)]
        assert peaks[1] <= peaks[0], seed
        less += peaks[0] < block.given_bytes
    assert less >= 5


def kernel(time_us: float, *needs: int) -> Task:
    return Task(needs=needs, time_us=time_us)


def test_a_gather_that_is_needed_late_does_not_fill_the_link() -> None:
    """Given first, it would be in front of the collective that the last kernel waits for."""
    late, urgent = Task(link_us=10), Task(needs=(2,), link_us=4)
    tasks = (
        late,
        Task(needs=(0,), waits_for=0),
        kernel(1),
        urgent,
        Task(needs=(3,), waits_for=3),
        kernel(12, 4),
        kernel(1, 1, 5),
    )
    block = Block(tasks)
    order = list_schedule(block, 0)
    assert order.index(3) < order.index(0)
    assert simulate(block, order).time_us == 18.0  # 1, wait for 4, 12, 1
    assert simulate(block, [2, 0, 3, 4, 5, 1, 6]).time_us > 18.0


def test_collectives_that_take_no_time_are_waited_for() -> None:
    block = Block((Task(), Task(needs=(0,), waits_for=0), kernel(1, 1), kernel(2)))
    order = list_schedule(block, 0)
    assert is_valid(block, order)
    assert simulate(block, order).time_us == 3.0


def test_kernels_far_behind_wait_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective under way holds its operand, also beside the kernel that may move no further."""
    monkeypatch.setattr("sp_compiler.solve.schedule_walk._REACH", 8)
    for seed in range(20):
        block = random_block(seed, 25)
        tight, _ = limits(block)
        order = list_schedule(block, tight)
        assert is_valid(block, order)
        assert peak_bytes(block, order) <= tight, seed


def test_a_block_of_hundreds_of_tasks_is_scheduled() -> None:
    block = random_block(0, 450)
    order = list_schedule(block, limits(block)[1])
    assert is_valid(block, order)
    assert simulate(block, order).time_us < simulate(block, range(len(order))).time_us


def test_bytes_by_hand() -> None:
    """While a task runs there is what it makes beside what lives: the last two tasks read it."""
    tasks = (
        Task(makes=(0,), run_bytes=4),
        Task(needs=(0,), makes=(1,), reads=(0,), run_bytes=3),
        Task(needs=(0, 1), reads=(0, 1), run_bytes=2),
    )
    block = Block(tasks, (4, 2), frozenset())
    assert [Memory(block).run(0), peak_bytes(block, (0, 1)), peak_bytes(block, (0, 1, 2))] == [
        4,
        7,
        8,
    ]


def test_a_long_kernel_is_spared_for_another_collective() -> None:
    """It would begin just before one arrives, and leave nothing to run under the next."""
    block = Block(
        (
            Task(link_us=10.0),
            Task(needs=(0,), waits_for=0),
            Task(needs=(1,), time_us=1.0),
            Task(needs=(2,), link_us=10.0),
            Task(needs=(3,), waits_for=3),
            Task(needs=(4,), time_us=1.0),
            Task(time_us=9.0),
            Task(time_us=9.0),
        )
    )
    assert ListSchedule(block).quick_us(0) == 22.0
    assert least_us(block) == 22.0


def random_priorities(block: Block, seed: int) -> Priorities:
    draw = random.Random(seed)
    return Priorities(
        tuple(draw.random() for _ in block.tasks),
        {start: draw.uniform(0, 40) for start in block.wait_of},
        sparing=draw.random() < 0.5,
    )


@pytest.mark.parametrize("memory", ["tight", "free"])
def test_a_walk_ends_early_only_if_its_order_would_cost_more(memory: str) -> None:
    ended = 0
    for seed in range(60):
        block = random_block(seed, 25)
        limit, given = limits(block)[memory == "free"], list(range(len(block.tasks)))
        priorities, fitting = random_priorities(block, seed), Fitting(block, given)
        walk = walked(block, limit, priorities, fitting)
        assert walk is not None
        assert peak_bytes(block, walk.order) <= limit
        assert walk.time_us == simulate(block, walk.order).time_us
        again = walked(block, limit, priorities, fitting, walk.cost_us)
        assert again is not None
        assert again.order == walk.order
        ended += walked(block, limit, priorities, fitting, 0.95 * walk.cost_us) is None
    assert ended > 40


def test_nothing_ends_before_the_clock_says() -> None:
    for seed in range(40):
        block = random_block(seed, 25)
        for link_factor in (1.0, 2.0):
            clock, bounds = Clock(block, link_factor), []
            for position in range(len(block.tasks)):
                clock.run(position)
                bounds.append(clock.least_us)
            assert max(bounds) <= clock.time_us + 1e-9, seed


def test_bytes_of_several_tasks_are_those_of_one_after_the_other() -> None:
    for seed in range(20):
        block = random_block(seed, 12)
        order, memory, one_by_one = range(len(block.tasks)), Memory(block), Memory(block)
        reached = [one_by_one.run(position) for position in order]
        limit = sorted(reached)[len(reached) // 2]
        first_above = next(bytes_ for bytes_ in reached if bytes_ > limit)
        assert Memory(block).run_all(order, limit) == first_above
        assert memory.run_all(order, max(reached)) == max(reached)
        assert memory.live_bytes == one_by_one.live_bytes


def test_one_search_finds_for_all_limits_what_a_new_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where walks that nothing limited stand for those with more memory."""
    walks = 0

    def counted(*args: Any) -> Walked | None:
        nonlocal walks
        walks += 1
        return walked(*args)

    monkeypatch.setattr("sp_compiler.solve.list_schedule.walked", counted)
    for seed in range(10):
        block = random_block(seed, 16)
        tight, free = limits(block)
        search = ListSchedule(block)
        for limit in (tight, (tight + free) // 2, free, 2 * free):
            quick_us, walks_before = search.quick_us(limit), walks
            assert search.quick_us(limit) == quick_us
            assert walks == walks_before
            assert ListSchedule(block).quick_us(limit) == quick_us
            assert search.order(limit) == list_schedule(block, limit)
        walks_before = walks
        search.quick_us(3 * free)
        assert walks == walks_before


def test_a_collective_yields_to_one_with_more_kernels_behind_it() -> None:
    """Two halves of a layer, each with a sum and a gather between attention and MLP.

    When the second half's sum could start, a norm is all that is left before the first half's
    gather, behind which most of its kernels are.
    """
    tasks: list[Task] = []
    gathers: list[int] = []
    sums: list[int] = []

    def kernels(need: int | None, *times_us: float) -> int:
        for time_us in times_us:
            tasks.append(Task(needs=() if need is None else (need,), time_us=time_us))
            need = len(tasks) - 1
        return len(tasks) - 1

    def collective(need: int, starts: list[int]) -> int:
        starts.append(len(tasks))
        tasks.append(Task(needs=(need,), link_us=60.0))
        tasks.append(Task(needs=(starts[-1],), waits_for=starts[-1]))
        return len(tasks) - 1

    halves = [kernels(None, 15.0), kernels(None, 15.0)]
    attention, norm, mlp = [7.0] * 10, [2.0] * 7, [60.0, 5.0, 60.0, 5.0, 60.0]
    for starts, times_us in ((gathers, attention), (sums, norm), (gathers, mlp)):
        halves = [kernels(collective(half, starts), *times_us) for half in halves]
    halves = [collective(half, sums) for half in halves]
    block = Block(tuple(tasks))
    order = list_schedule(block, 0)
    assert order.index(gathers[2]) < order.index(sums[1])
    # Started as soon as it could, the sum would make it 775.
    assert simulate(block, order).time_us == 743.0
