"""Solvers that have an alternative: the result of each and the time that it takes.

    python -m benchmarks.solver_ways [placement] [budget] [frontier] [formula] [explain]
        [--models llama t5] [--tp 2 8]

- placement: elimination beside the linear program, on the problems of the test models;
- budget: the dynamic program over calls beside one linear program of calls x splits;
- frontier: corners of the recompute frontier by HiGHS and by networkx' minimum cuts;
- formula: deriving the formula of the saved bytes beside fitting it to plans at other sizes, of
  which one is needed for each term at least;
- explain: explaining one weight, which solves the placement again for each of its alternatives,
  beside the whole plan.

Times are CPU seconds, which do not depend on other load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import networkx as nx
import numpy as np
import sympy
import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import nn

from benchmarks.models import PRESETS, PlainGPT
from sp_compiler.api import plan
from sp_compiler.compiler import to_program
from sp_compiler.options import CompileOptions
from sp_compiler.passes.memory import budget, candidates
from sp_compiler.passes.sharding.outputs import route_outputs
from sp_compiler.passes.sharding.shard import placement_problem
from sp_compiler.solve import memory_budget, recompute_frontier
from sp_compiler.solve.elimination import Elimination
from sp_compiler.solve.memory_budget import CallSplits
from sp_compiler.solve.placement import cost_of
from sp_compiler.solve.placement_milp import solve_integer_program
from sp_compiler.solve.recompute_frontier import Choice, ForwardValue
from sp_compiler.trace.export import capture
from tests.models import architectures, zoo

Result = TypeVar("Result")
_GIVE_UP_S = 60.0
_MIB = 2.0**20


def timed(function: Callable[..., Result], *args: Any) -> tuple[Result, float]:
    """The result of a call and its CPU seconds."""
    start = time.process_time()
    result = function(*args)
    return result, time.process_time() - start


# Placement.


def placement_row(model: nn.Module, kwargs: dict[str, Any], tp: int) -> tuple[str, ...]:
    """Vertices, seconds before, of elimination and of the linear program, relative difference."""
    options = CompileOptions(tp=tp)
    program, before = timed(lambda: to_program(capture(model, (), kwargs), options))
    builder = placement_problem(route_outputs(program), options, {}, ())
    vertices, price = builder.problem.vertices, builder.prices.conversion_us
    choices, eliminate = timed(Elimination(vertices, price).run)
    (chosen, _), search = timed(solve_integer_program, vertices, price)
    seconds = tuple(f"{each:.2f}" for each in (before, eliminate, search))
    if choices is None:
        return str(len(vertices)), *seconds, "too wide"
    costs = [cost_of(vertices, each, price) for each in (choices, chosen)]
    return str(len(vertices)), *seconds, f"{abs(costs[0] - costs[1]) / max(costs):.0e}"


def placement_cases(
    names: Sequence[str], ranks: Sequence[int]
) -> Iterator[tuple[str, int, nn.Module, dict[str, Any]]]:
    """Models of the zoo on each number of ranks, and other architectures on one of 2, 4, 8."""
    for name in zoo.names():
        for tp in ranks if not names or name in names else ():
            yield name, tp, zoo.build(name), zoo.inputs(name)
    for name in architectures.names():
        if not names or name in names:
            tp = architectures.turn(name, "dividing")
            size = architectures.size("dividing", tp)
            with architectures.float64():
                yield name, tp, architectures.build(name, size), architectures.inputs(name, size)


# Budget.


class _Grabbed(Exception):
    """Problems that a plan under a budget would have solved."""


def budget_problem_of(model: nn.Module, kwargs: dict[str, Any], tp: int) -> list[CallSplits]:
    """The problem that a budget poses, whatever the budget."""

    def grab(calls: list[CallSplits], limit_bytes: int) -> None:
        raise _Grabbed(calls)

    try:
        with mock.patch.object(budget, "cheapest", grab):
            plan(model, ((), kwargs), tp=tp, recompute="auto", memory_budget=10**15)
    except _Grabbed as grabbed:
        calls: list[CallSplits] = grabbed.args[0]
        return calls
    raise AssertionError("no budget was asked for")


class _Program:
    """The linear program of calls x splits.

    Columns: each split of each call, and for each shared storage whether it is saved by then.
    """

    def __init__(self, calls: Sequence[CallSplits], limit_bytes: int) -> None:
        self.calls = calls
        self.limit_bytes = limit_bytes
        self.costs: list[float] = []
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []
        self.first: list[int] = []
        self._saved: dict[Any, int] = {}
        self._own: list[tuple[int, float]] = []
        for call in calls:
            self._add(call)

    def _add(self, call: CallSplits) -> None:
        start = len(self.costs)
        self.first.append(start)
        self.costs += [split.time_us for split in call.splits]
        self.rows.append(([(start + k, 1.0) for k in range(len(call.splits))], 1.0, 1.0))
        for live in call.before:
            self._fits(live, [split.forward_bytes for split in call.splits])
        self._own += [(start + k, split.own_bytes / _MIB) for k, split in enumerate(call.splits)]
        for storage in dict.fromkeys(s for split in call.splits for s in split.shared):
            column = len(self.costs)
            self.costs.append(0.0)
            savers = [k for k, split in enumerate(call.splits) if storage in split.shared]
            self.rows.append(([(column, 1.0), *((start + k, -1.0) for k in savers)], 0.0, np.inf))
            if storage in self._saved:
                self.rows.append(([(column, 1.0), (self._saved[storage], -1.0)], 0.0, np.inf))
            self._saved[storage] = column
        for live in call.after:
            self._fits(live)
        for live in call.inside:
            self._fits(live, [split.backward_bytes for split in call.splits])

    def _fits(self, live: frozenset[Any], inside: Sequence[float] = ()) -> None:
        shared = [(c, s.num_bytes / _MIB) for s, c in self._saved.items() if s not in live]
        works = [(self.first[-1] + k, size / _MIB) for k, size in enumerate(inside)]
        room = self.limit_bytes - sum(storage.num_bytes for storage in live)
        self.rows.append(([*self._own, *works, *shared], -np.inf, room / _MIB))


def cheapest_by_program(
    calls: Sequence[CallSplits], limit_bytes: int
) -> tuple[list[int] | None, float]:
    """The split of each call by one linear program, and the gap that it was left with."""
    program = _Program(calls, limit_bytes)
    entries = [
        (r, c, factor) for r, (terms, _, _) in enumerate(program.rows) for c, factor in terms
    ]
    r, c, factors = zip(*entries, strict=True)
    matrix = csr_array((factors, (r, c)), shape=(len(program.rows), len(program.costs)))
    _, lower, upper = zip(*program.rows, strict=True)
    integrality = np.zeros(len(program.costs))
    spans = [
        slice(start, start + len(call.splits))
        for start, call in zip(program.first, calls, strict=True)
    ]
    for span in spans:
        integrality[span] = 1
    result = milp(
        np.array(program.costs),
        constraints=LinearConstraint(matrix, np.array(lower), np.array(upper)),
        integrality=integrality,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-9, "time_limit": _GIVE_UP_S},
    )
    if result.x is None:
        return None, np.inf
    return [int(np.argmax(result.x[span])) for span in spans], float(result.mip_gap)


def budget_rows(calls: Sequence[CallSplits]) -> Iterator[tuple[str, ...]]:
    """Part of the way from the least budget to the fastest, seconds and us of both ways."""
    fastest = [min(range(len(c.splits)), key=lambda k: c.splits[k].time_us) for c in calls]
    least = memory_budget.peak_bytes(calls, memory_budget.smallest(calls))
    most = memory_budget.peak_bytes(calls, fastest)
    for part in (0.05, 0.3, 0.5, 0.7, 0.9):
        limit = int(least + (most - least) * part)
        picks, walk = timed(memory_budget.cheapest, calls, limit)
        (others, gap), search = timed(cheapest_by_program, calls, limit)
        times = [
            "none"
            if each is None
            else f"{sum(c.splits[k].time_us for c, k in zip(calls, each, strict=True)):.6f}"
            for each in (picks, others)
        ]
        yield f"{part}", f"{walk:.2f}", f"{search:.2f}", f"{gap:.0e}", *times


def budget_cases() -> Iterator[tuple[str, nn.Module, dict[str, Any], int]]:
    """Small models, and GPTs of 48 and 96 layers."""
    for name in ("plain", "llama", "t5"):
        yield name, zoo.build(name, dropout=0.1), zoo.inputs(name), 2
    for name in ("gpt-22b", "gpt3-175b"):
        with torch.device("meta"):
            ids = torch.zeros(1, 2048, dtype=torch.long)
            model = PlainGPT(PRESETS[name]).bfloat16()
        yield name, model, {"input_ids": ids, "labels": ids}, 8


# Frontier.


def saved_by_cut(values: Sequence[ForwardValue], us_per_byte: float) -> Choice | None:
    """The choice of least time and price of bytes, as a minimum cut.

    Each value has two vertices: "there" is on the source's side if the value is saved or
    recomputed, "again" if it is recomputed.
    """
    graph = nx.DiGraph()
    for index, value in enumerate(values):
        there, again = ("there", index), ("again", index)
        if value.needed:
            graph.add_edge("source", there)
        limit = {"capacity": us_per_byte * value.num_bytes} if value.can_keep else {}
        graph.add_edge(there, again, **limit)
        graph.add_edge(again, "sink", **({"capacity": value.time_us} if value.can_repeat else {}))
        graph.add_edge(again, there)
        for parent in value.parents:
            graph.add_edge(again, ("there", parent))
    if "source" not in graph:
        return Choice(frozenset(), 0, 0.0)
    _, (side, _) = nx.minimum_cut(graph, "source", "sink")
    kept = {i for i in range(len(values)) if ("there", i) in side and ("again", i) not in side}
    return recompute_frontier.evaluate(values, frozenset(kept))


class _Cuts:
    """Stands in for the linear program where corners are looked for."""

    def __init__(self, values: Sequence[ForwardValue]) -> None:
        self.values = values

    def solve(self, *, us_per_byte: float) -> Choice | None:
        return saved_by_cut(self.values, us_per_byte)


@contextmanager
def _recorded(problems: list[Sequence[ForwardValue]]) -> Iterator[None]:
    def record(values: Sequence[ForwardValue]) -> list[Choice]:
        problems.append(values)
        return recompute_frontier.frontier(values)

    with mock.patch.object(candidates, "frontier", record):
        yield


def frontier_rows(model: nn.Module, kwargs: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of each region the values, the corners, seconds of both ways, and whether they agree."""
    problems: list[Sequence[ForwardValue]] = []
    with _recorded(problems):
        plan(model, ((), kwargs), tp=2, recompute="auto", memory_budget=10**12)
    for values in problems:
        program = recompute_frontier.SavingProgram(values, host_us=0.0)
        small, fast = program.solve(us_per_byte=np.inf), program.solve()
        if small is None or fast is None or small.num_bytes >= fast.num_bytes:
            continue
        corners, highs = timed(recompute_frontier._corners, program, small, fast)
        cuts, networkx = timed(recompute_frontier._corners, _Cuts(values), small, fast)
        same = {c.kept for c in corners} == {c.kept for c in cuts}
        yield str(len(values)), str(len(corners)), f"{highs:.2f}", f"{networkx:.2f}", str(same)


# What a plan derives when it is asked.


def formula_row(model: nn.Module, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Seconds of a plan and of its formula, terms, and seconds of as many plans."""
    planned, planning = timed(lambda: plan(model, ((), kwargs), tp=2))
    formula, deriving = timed(lambda: planned.activation_formula)
    terms = len(sympy.Add.make_args(formula.total))
    return f"{planning:.2f}", f"{deriving:.3f}", str(terms), f"{planning * terms:.1f}"


def explain_row(model: nn.Module, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Seconds of a plan and of explaining the largest weight, and its alternatives."""
    planned, planning = timed(lambda: plan(model, ((), kwargs), tp=2))
    largest = max(model.named_parameters(), key=lambda named: named[1].numel())[0]
    explanation, explaining = timed(lambda: planned.explain(largest))
    alternatives = sum(
        len(each.stored) + sum(len(operator.ways) for operator in each.operators)
        for each in explanation.parameters
    )
    return f"{planning:.2f}", f"{explaining:.2f}", str(alternatives)


Rows = Iterator[tuple[str, ...]]
_NAMES = ("plain", "llama", "t5", "bert")


def _placement(models: Sequence[str], ranks: Sequence[int]) -> Rows:
    yield "tp", "vertices", "before", "elimination", "program", "difference"
    for name, tp, model, kwargs in placement_cases(models, ranks):
        yield name, str(tp), *placement_row(model, kwargs, tp)


def _budget(models: Sequence[str], ranks: Sequence[int]) -> Rows:
    yield "budget", "dynamic", "program", "gap", "us", "us of program"
    for name, model, kwargs, tp in budget_cases():
        if not models or name in models:
            for row in budget_rows(budget_problem_of(model, kwargs, tp)):
                yield name, *row


def _frontier(models: Sequence[str], ranks: Sequence[int]) -> Rows:
    yield "values", "corners", "HiGHS", "networkx", "same"
    for name in models or _NAMES:
        for row in frontier_rows(zoo.build(name, dropout=0.1), zoo.inputs(name)):
            yield name, *row


def _formula(models: Sequence[str], ranks: Sequence[int]) -> Rows:
    yield "plan", "formula", "terms", "plans to fit"
    for name in models or _NAMES:
        yield name, *formula_row(zoo.build(name), zoo.inputs(name))


def _explain(models: Sequence[str], ranks: Sequence[int]) -> Rows:
    yield "plan", "explain", "alternatives"
    for name in models or _NAMES:
        yield name, *explain_row(zoo.build(name), zoo.inputs(name))


_KINDS = {
    "placement": _placement,
    "budget": _budget,
    "frontier": _frontier,
    "formula": _formula,
    "explain": _explain,
}


def main() -> None:
    """Print a table for each comparison that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *_KINDS], default=[])
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--tp", type=int, nargs="*", default=[2, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in options.kinds or _KINDS:
        # The names of the columns, then the rows.
        head, *rows = _KINDS[kind](options.models, options.tp)
        table = Table("CPU seconds", *head)
        for row in rows:
            table.add_row(*row)
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
