"""Local search for a shorter order of a block.

A task moves to another place in the order, together with those tasks in between that would end up
on the wrong side of it, so that every order is valid. Its time and its peak are then simulated as a
whole: for a block of a hundred tasks that takes about 30 microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sp_compiler.solve.block_schedule import Block, peak_bytes
from sp_compiler.solve.schedule_walk import SLOW_LINK, cost_us

# What a move costs beside the simulation, in tasks simulated. Few tasks have few orders: so many
# moves for each pair of them are enough.
_TASKS_OF_MOVE, _MOVES_OF_PAIR = 25, 100


def improved(
    block: Block,
    limit_bytes: int,
    orders: Sequence[Sequence[int]],
    bound_us: float,
    tasks_simulated: int,
) -> list[int]:
    """Return an order that takes at most ``bound_us``, or costs at most as much as the best of
    ``orders`` (:func:`~sp_compiler.solve.schedule_walk.cost_us`).

    The result is the same for the same arguments, on every rank.

    Args:
        limit_bytes: limit for :func:`peak_bytes`, which ``orders`` keep to.
        bound_us: an order that takes no longer ends the search.
        tasks_simulated: limit for the effort; half of it is divided among ``orders``, with the rest
            the search goes on from the best result.
    """
    search, num_tasks = _Search(block, limit_bytes, bound_us), len(block.tasks)
    moves = tasks_simulated // (num_tasks + _TASKS_OF_MOVE)
    moves = min(moves, _MOVES_OF_PAIR * num_tasks**2) // 2
    found = []
    # Poor orders, too: what the best one lacks may be too many moves away from it.
    for order in orders:
        found.append(search.improved(list(order), moves // len(orders)))
        if search.is_enough(found[-1]):
            return found[-1]
    return search.improved(min(found, key=search.cost_us), moves)


class _Search:
    def __init__(self, block: Block, limit_bytes: int, bound_us: float) -> None:
        self._block, self._limit_bytes, self._bound_us = block, limit_bytes, bound_us
        tasks = range(len(block.tasks))
        self._start_of = [block.starts_of.get(position) for position in tasks]
        self._link_us = [task.link_us for task in block.tasks]
        self._blocks = [block.blocks(position) for position in tasks]
        self._reaches = [1 << bit for bit in range(len(tasks).bit_length())]
        # Seeded, because every rank has to find the same order; random() is the one method that
        # gives the same numbers in all versions of Python.
        self._draw = random.Random(0).random

    def cost_us(self, order: Sequence[int]) -> float:
        """Return what orders are compared by."""
        return cost_us(self._time_us(order, 1.0), self._time_us(order, SLOW_LINK))

    def is_enough(self, order: Sequence[int]) -> bool:
        """Return whether ``order`` takes no longer than the time that ends the search."""
        return self._time_us(order, 1.0) <= self._bound_us

    def improved(self, order: list[int], moves: int) -> list[int]:
        """Return the result of so many attempts to move a task of ``order``.

        It costs no more (time and a fraction of the time on a slow link), but may take longer.
        """
        if self.is_enough(order):
            return order
        least_us = self.cost_us(order)
        for _ in range(moves):
            moved = self._moved(order)
            if moved is None:
                continue
            time_us = self._time_us(moved, 1.0)
            if cost_us(time_us, time_us) > least_us:  # no order is faster on a slower link
                continue
            moved_us = cost_us(time_us, self._time_us(moved, SLOW_LINK))
            # Also if it costs the same: other moves lead on from there.
            if moved_us <= least_us and peak_bytes(self._block, moved) <= self._limit_bytes:
                order, least_us = moved, moved_us
                if time_us <= self._bound_us:
                    break
        return order

    def _moved(self, order: list[int]) -> list[int] | None:
        """Return ``order`` with one of its tasks elsewhere; ``None`` if all of the tasks that it
        would pass have to stay on their side of it."""
        draw, reaches = self._draw, self._reaches
        place = int(draw() * len(order))
        # Up to 1, 2, 4, 8, ... places, each as often: near ones refine what far ones find.
        distance = 1 + int(draw() * reaches[int(draw() * len(reaches))])
        is_earlier, task = draw() < 0.5, order[place]
        if is_earlier:
            first, end = max(0, place - distance), place + 1
            passed, ordered = order[first:place], self._block.before[task]
        else:
            first, end = place, place + 1 + distance
            passed, ordered = order[place + 1 : end], self._block.behind[task]
        along = [each for each in passed if ordered >> each & 1]
        if len(along) == len(passed):
            return None
        others = [each for each in passed if not ordered >> each & 1]
        moved = (*along, task, *others) if is_earlier else (*others, task, *along)
        return [*order[:first], *moved, *order[end:]]

    def _time_us(self, order: Sequence[int], link_factor: float) -> float:
        """Return the time that :func:`~sp_compiler.solve.block_schedule.simulate` finds."""
        # Its clock, inlined: a search times some ten thousand orders.
        on_link, start_of, blocks = self._block.on_link, self._start_of, self._blocks
        times_us, link_us = self._block.times_us, self._link_us
        now_us = link_free_us = 0.0
        arrival_us: dict[int, float] = {}
        for position in order:
            if on_link[position]:
                start = start_of[position]
                if start is None:
                    link_free_us = max(now_us, link_free_us) + link_us[position] * link_factor
                    arrival_us[position] = link_free_us
                    if blocks[position]:
                        now_us = link_free_us
                elif arrival_us[start] > now_us:
                    now_us = arrival_us[start]
            now_us += times_us[position]
        return max(now_us, link_free_us)
