"""OPT, the shortest order of a block: a yardstick for :mod:`sp_compiler.solve.list_schedule`.

A job shop with two machines, the compute stream and the link, and a limit on memory, solved by the
constraint solver of OR-Tools, CP-SAT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ortools.sat.python import cp_model

from sp_compiler.solve.block_schedule import Block, simulate
from sp_compiler.solve.schedule_bound import least_us

_PROVEN = 1e-3  # a bound as close as this to an order's time, relative to it, proves the order


@dataclass(frozen=True)
class Exact:
    """The best order that was found, and a time below which there is none.

    Attributes:
        least_us: no order is shorter than this.
        proven: whether the order takes no more than 0.1 % longer.
    """

    order: list[int]
    least_us: float
    proven: bool


def exact_schedule(
    block: Block,
    limit_bytes: int,
    known: Sequence[int],
    seconds: float,
    *,
    workers: int = 2,
    ticks_per_us: int = 1000,
) -> Exact:
    """Return the shortest order of ``block`` whose peak is at most ``limit_bytes``.

    While a task of ``block`` runs, it takes no less than what it makes; but for a first one that
    all others need.

    Args:
        limit_bytes: at least what ``known`` takes.
        known: some order, which the solver is told.
        seconds: after so long the search gives up; the bound stays true.
        workers: threads of the solver.
        ticks_per_us: the solver's times are integers. Finer ones make the bound better and, in
            little memory, the search slower: it finds out tick by tick what cannot be.
    """
    bound_us, known_us = least_us(block), simulate(block, known).time_us
    if known_us <= bound_us * (1 + _PROVEN):
        return Exact(list(known), bound_us, True)
    program = _Program(block, limit_bytes, known, ticks_per_us)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.relative_gap_limit = _PROVEN / 2  # the rest is for the additional ticks
    status = solver.solve(program.model)
    order = list(known)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        order.sort(key=lambda position: solver.value(program.begins[position]))
        order = min(order, list(known), key=lambda order: simulate(block, order).time_us)
    # Every task takes up to two ticks more than in the block.
    bound_us = max(bound_us, (solver.best_objective_bound - 2 * len(order)) / ticks_per_us)
    return Exact(order, bound_us, simulate(block, order).time_us <= bound_us * (1 + _PROVEN))


class _Program:
    """The constraints that an order has to meet, in ticks.

    Attributes:
        model: minimizes the time.
        begins: by task, when the compute stream reaches it.
    """

    def __init__(
        self, block: Block, limit_bytes: int, known: Sequence[int], ticks_per_us: int
    ) -> None:
        self.model = cp_model.CpModel()
        self._block, self._limit_bytes, self._ticks_per_us = block, limit_bytes, ticks_per_us
        timeline = simulate(block, known)
        self._most = math.ceil(timeline.time_us * self._ticks_per_us) + 3 * len(block.tasks)
        tasks = range(len(block.tasks))
        self.begins = [self._time(f"begin_{i}") for i in tasks]
        self._ends = [self._time(f"end_{i}") for i in tasks]
        self._runs = [self._run(i) for i in tasks]
        self.model.add_no_overlap(self._runs)
        self._add_link()
        self._add_memory()
        for position, task in enumerate(block.tasks):
            for needed in task.needs:
                self.model.add(self.begins[position] >= self._ends[needed])
        for place, position in enumerate(known):
            hint = self._ticks(timeline.start_us[position]) + 2 * place
            self.model.add_hint(self.begins[position], hint)

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._most, name)

    def _ticks(self, time_us: float) -> int:
        return math.ceil(time_us * self._ticks_per_us)

    def _run(self, position: int) -> cp_model.IntervalVar:
        """Return when a task keeps the compute stream."""
        # One tick more than it takes: tasks that take no time have an order, too.
        least = self._ticks(self._block.times_us[position]) + 1
        begin, end = self.begins[position], self._ends[position]
        if not self._block.blocks(position):
            self.model.add(end == begin + least)
        size = self.model.new_int_var(least, self._most, f"size_{position}")
        return self.model.new_interval_var(begin, size, end, f"run_{position}")

    def _add_link(self) -> None:
        """Collectives run on the link one after another, in the order of their starts."""
        block, model = self._block, self.model
        total = model.new_int_var(
            math.floor(least_us(block) * self._ticks_per_us), self._most, "total"
        )
        sent = [i for i in range(len(block.tasks)) if block.communicates(i)]
        leaves = {i: self._time(f"leaves_{i}") for i in sent}
        arrives = {i: leaves[i] + self._ticks(block.tasks[i].link_us) for i in sent}
        for i in sent:
            model.add(leaves[i] >= self.begins[i])
            model.add(total >= arrives[i])
            if block.blocks(i):
                model.add(self._ends[i] >= arrives[i] + self._ticks(block.times_us[i]))
            else:
                model.add(self.begins[block.wait_of[i]] >= arrives[i])
        for one, other in combinations(sent, 2):
            for first, second, in_order in self._orders(one, other):
                model.add(self.begins[first] < self.begins[second]).only_enforce_if(in_order)
                model.add(arrives[first] <= leaves[second]).only_enforce_if(in_order)
        for end in self._ends:
            model.add(total >= end)
        model.minimize(total)

    def _orders(self, one: int, other: int) -> list[tuple[int, int, cp_model.LiteralT]]:
        """Return the orders of two tasks that are possible, each with what tells whether it is."""
        if self._block.behind[one] >> other & 1:
            return [(one, other, True)]
        if self._block.behind[other] >> one & 1:
            return [(other, one, True)]
        is_first = self.model.new_bool_var(f"{one}_before_{other}")
        return [(one, other, is_first), (other, one, ~is_first)]

    def _add_memory(self) -> None:
        """A storage exists from the end of the task that makes it to the end of the last that makes
        or reads it."""
        block, model = self._block, self.model
        maker = {made: i for i, task in enumerate(block.tasks) for made in task.makes}
        held_by: dict[int, list[int]] = {storage: [] for storage in maker}
        for position, held in enumerate(block.holders):
            for storage in held:
                held_by[storage].append(position)
        exist, demands = list(self._runs), list(block.run_bytes)
        for storage, position in maker.items():
            holders = held_by[storage]
            if holders == [position]:
                continue  # it dies with its task, whose bytes include it
            dies = self._time(f"dies_{storage}")
            if storage in block.returned:
                model.add(dies == self._most)
            for each in holders:
                if not any(block.behind[each] >> other & 1 for other in holders):
                    model.add(dies >= self._ends[each])
            size = model.new_int_var(0, self._most, f"lives_{storage}")
            begin = self._ends[position]
            exist.append(model.new_interval_var(begin, size, dies, f"exists_{storage}"))
            demands.append(block.storage_bytes[storage])
        model.add_cumulative(exist, demands, self._limit_bytes)
