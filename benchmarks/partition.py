"""Cuts of the paper's models into pipeline stages that recompute as much as their memory demands.

    python -m benchmarks.partition [--models gpt3-175b ...] [--memory 80]

A stage keeps as many microbatches as follow it (1F1B), so the first ones recompute most. For every
stage the layers' recompute settings are chosen by counts, all of them tried: equal layers differ in
nothing else. Three cuts: equal numbers of layers; Lynx's greedy (arXiv 2406.08756), which moves a
layer from the slowest stage to the fastest while the slowest gets faster; and the exact program of
:mod:`sp_compiler.solve.pipeline_cut`. Times and bytes are those of the compiler's graphs on the
profile "a100", state is 18 bytes for each parameter.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.models import PAPER_SETUPS, PlainGPT
from benchmarks.performance import markdown_table
from sp_compiler.base.units import time_text
from sp_compiler.grid_plan.settings import build_settings
from sp_compiler.grid_plan.stage_plan import STATE_BYTES
from sp_compiler.options import CompileOptions
from sp_compiler.planning.data import CallPlan
from sp_compiler.planning.plan import Plan
from sp_compiler.solve.pipeline_cut import fastest_cut

POLICIES = ("none", "attention", "selective", "full")
# Part of the 80 GiB for the context, libraries and fragmentation.
RESERVED_BYTES = 4 << 30


@dataclass(frozen=True)
class Way:
    """One recompute setting of a call."""

    time_us: float
    kept_bytes: int
    working_bytes: int


@dataclass(frozen=True)
class Piece:
    """A call that is cut as one: a layer, or the code before or after the layers.

    Attributes:
        ways: by policy; equal ones for layers, which is how they are known.
    """

    ways: tuple[Way, ...]
    state_bytes: float


@cache
def pieces(name: str) -> tuple[Piece, ...]:
    """Return the calls of the model ``name``; two of its layers are compiled."""
    setup = PAPER_SETUPS[name]
    with torch.device("meta"):
        model = PlainGPT(replace(setup.model, num_layers=2)).bfloat16()
        ids = torch.zeros(setup.micro_batch, setup.sequence_length, dtype=torch.long)
    settings = [
        CompileOptions(tp=8, recompute=policy, hardware="a100", tables_apart=True)
        for policy in POLICIES
    ]
    compiled = build_settings(model, (), {"input_ids": ids, "labels": ids}, settings)
    plans = [each.plan for each in compiled]
    found: list[Piece] = []
    for calls in zip(*(_trained(plan) for plan in plans if isinstance(plan, Plan)), strict=True):
        ways = tuple(
            Way(call.step_us, sum(size for _, size in call.kept), call.memory.most_bytes)
            for call, _ in calls
        )
        found.append(Piece(ways, STATE_BYTES * calls[0][1]))
    layers = [number for number, (call, _) in enumerate(_trained(plans[0])) if call.path]
    depth = setup.model.num_layers
    return (*found[: layers[0]], *[found[layers[0]]] * depth, *found[layers[-1] + 1 :])


def _trained(plan: object) -> list[tuple[CallPlan, int]]:
    """Return the calls that have parameters, with the number of their elements."""
    assert isinstance(plan, Plan)
    sizes = plan.parameters
    counted = [(call, sum(sizes[name].numel for name in call.parameters)) for call in plan.calls]
    return [(call, count) for call, count in counted if count]


class Stages:
    """The fastest settings of any part of a model as a stage, within its memory."""

    def __init__(self, parts: Sequence[Piece], num_stages: int, memory_bytes: float) -> None:
        self.parts, self.num_stages, self._memory_bytes = parts, num_stages, memory_bytes
        self._known: dict[tuple[int, int, int], float] = {}

    def time_us(self, stage: int, start: int, stop: int) -> float:
        """Return the time of one microbatch; infinite where no settings fit."""
        if (stage, start, stop) not in self._known:
            self._known[stage, start, stop] = self._fastest_us(stage, self.parts[start:stop])
        return self._known[stage, start, stop]

    def _fastest_us(self, stage: int, own: Sequence[Piece]) -> float:
        counts = [(piece, len([*group])) for piece, group in itertools.groupby(own)]
        in_flight = self.num_stages - stage
        room = self._memory_bytes - sum(piece.state_bytes for piece in own)
        best_us = math.inf
        for mix in itertools.product(*(_mixes(len(p.ways), count) for p, count in counts)):
            used = [
                (piece.ways[policy], number)
                for (piece, _), numbers in zip(counts, mix, strict=True)
                for policy, number in enumerate(numbers)
                if number
            ]
            kept_bytes = in_flight * sum(way.kept_bytes * number for way, number in used)
            if kept_bytes + max(way.working_bytes for way, _ in used) <= room:
                best_us = min(best_us, sum(way.time_us * number for way, number in used))
        return best_us

    def slowest_us(self, ends: Sequence[int]) -> float:
        """Return the time of the slowest stage of a cut."""
        return max(self._times_us(ends))

    def _times_us(self, ends: Sequence[int]) -> list[float]:
        spans = itertools.pairwise([0, *ends])
        return [self.time_us(stage, *span) for stage, span in enumerate(spans)]

    def even(self) -> list[int]:
        """Cut into equal numbers of layers, what is outside of them on either end."""
        layers = max(self.parts.count(piece) for piece in self.parts)
        first = next(n for n, piece in enumerate(self.parts) if self.parts.count(piece) == layers)
        ends = [first + layers * (n + 1) // self.num_stages for n in range(self.num_stages)]
        return [*ends[:-1], len(self.parts)]

    def greedy(self) -> list[int]:
        """Cut as Lynx does, beginning with equal numbers of layers."""
        ends = self.even()
        while True:
            times_us = self._times_us(ends)
            slowest, fastest = times_us.index(max(times_us)), times_us.index(min(times_us))
            # All cuts between the two move by one, so that the layers stay in order.
            shift = 1 if fastest < slowest else -1
            moved = list(ends)
            for cut in range(min(slowest, fastest), max(slowest, fastest)):
                moved[cut] += shift
            sizes = [stop - start for start, stop in itertools.pairwise([0, *moved])]
            if min(sizes) < 1 or self.slowest_us(moved) >= max(times_us):
                return ends
            ends = moved

    def exact(self) -> list[int] | None:
        """Cut by the exact program."""
        least_us = [min(way.time_us for way in piece.ways) for piece in self.parts]
        until_us = [0.0, *itertools.accumulate(least_us)]

        def added_us(stage: int, start: int, stop: int) -> float:
            # Rounding could make it negative.
            own_us = until_us[stop] - until_us[start]
            return max(0.0, self.time_us(stage, start, stop) - own_us)

        return fastest_cut(least_us, self.num_stages, added_us)


@cache
def _mixes(num_ways: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Return all ways to give ``count`` equal calls one of ``num_ways`` settings each."""
    if num_ways == 1:
        return ((count,),)
    return tuple(
        (number, *rest)
        for number in range(count + 1)
        for rest in _mixes(num_ways - 1, count - number)
    )


def rows(name: str, memory_bytes: float) -> Iterator[tuple[str, ...]]:
    """The slowest stage of each cut."""
    stages = Stages(pieces(name), PAPER_SETUPS[name].pipeline_parallel, memory_bytes)
    exact = stages.exact()
    cuts = {"even": stages.even(), "greedy": stages.greedy()}
    if exact is not None:
        cuts["exact"] = exact
    even_us = stages.slowest_us(cuts["even"])
    for cut, ends in cuts.items():
        slowest_us = stages.slowest_us(ends)
        # An even cut may not fit with any recompute setting.
        shown = time_text(slowest_us) if slowest_us < math.inf else "does not fit"
        gain = f"{100 * (even_us / slowest_us - 1):.1f} %" if even_us < math.inf else ""
        sizes = [stop - start for start, stop in itertools.pairwise([0, *ends])]
        text = ", ".join(f"{len([*g])} x {size}" for size, g in itertools.groupby(sizes))
        yield name, cut, shown, gain, text


def main() -> None:
    """Print a table in Markdown."""
    piped = [name for name, setup in PAPER_SETUPS.items() if setup.pipeline_parallel > 1]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=piped, default=piped)
    parser.add_argument("--memory", type=float, default=80, help="GiB of a device")
    options = parser.parse_args()
    memory_bytes = options.memory * 2**30 - RESERVED_BYTES
    head = ("model", "cut", "slowest stage", "faster than even", "calls by stage")
    found = [row for name in options.models for row in rows(name, memory_bytes)]
    print(markdown_table(head, found))


if __name__ == "__main__":
    main()
