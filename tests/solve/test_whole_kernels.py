"""Kernels of several tasks as one: every order of them is one of the tasks, and takes no more."""

from __future__ import annotations

import random

from sp_compiler.solve.block_schedule import Block, Task, is_valid, peak_bytes, simulate
from sp_compiler.solve.whole_kernels import whole_kernels
from tests.solve.test_list_schedule import random_block


def _some_order(block: Block, draw: random.Random) -> list[int]:
    order: list[int] = []
    while len(order) < len(block.tasks):
        ready = [i for i, task in enumerate(block.tasks) if set(task.needs) <= set(order)]
        order.append(draw.choice([i for i in ready if i not in order]))
    return order


def test_an_order_of_kernels_is_one_of_their_tasks() -> None:
    num_joined = num_exact = 0
    for seed in range(200):
        block, draw = random_block(seed, 12), random.Random(seed)
        on_link = block.on_link
        kernels = [None if on_link[i] else draw.randrange(2) for i in range(len(block.tasks))]
        whole, runs = whole_kernels(block, kernels)
        assert [position for run in runs for position in run] == list(range(len(block.tasks)))
        assert all(len({kernels[position] for position in run}) == 1 for run in runs)
        assert whole.given_bytes == block.given_bytes
        num_joined += sum(len(run) > 1 for run in runs)
        order = _some_order(whole, draw)
        apart = [position for index in order for position in runs[index]]
        assert is_valid(block, apart)
        assert simulate(whole, order).time_us == simulate(block, apart).time_us
        # A value that others read too may die before its kernel ends, and is not said to.
        assert peak_bytes(block, apart) <= peak_bytes(whole, order)
        num_exact += peak_bytes(block, apart) == peak_bytes(whole, order)
    assert num_joined > 200
    assert num_exact > 150


def test_what_only_the_kernel_reads_dies_inside_of_it() -> None:
    """A product, of which a kernel reads the result first, and three values between."""
    chain = [Task((0,), 1.0, makes=(1,), reads=(0,), run_bytes=8)]
    chain += [Task((i,), 1.0, makes=(i + 1,), reads=(i,), run_bytes=8) for i in range(1, 4)]
    block = Block(
        (Task(time_us=5.0, makes=(0,), run_bytes=100), *chain), (100, 8, 8, 8, 8), frozenset({4})
    )
    whole, runs = whole_kernels(block, [None, "a", "a", "a", "a"])
    assert runs == [range(1), range(1, 5)]
    # Beside the product's 100 bytes that of the first; behind it never more than two values.
    assert whole.tasks[1] == Task((0,), 4.0, makes=(4,), reads=(0,), run_bytes=8)
    assert whole.given_bytes == block.given_bytes == 108


def test_parts_of_a_kernel_that_others_lie_between_stay_apart() -> None:
    block = Block(tuple(Task(time_us=1.0) for _ in range(3)))
    assert whole_kernels(block, ["a", None, "a"]) == (block, [range(1), range(1, 2), range(2, 3)])
