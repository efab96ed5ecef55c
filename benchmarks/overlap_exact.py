"""Schedules of backwards compared with an exact program: HEU and OPT of Lynx.

    python -m benchmarks.overlap_exact [--models GPT Llama Mixtral] [--seconds 30]

The layers and links of :mod:`benchmarks.overlap`, and for each the backward that runs in a step
(for or behind another layer's, where that pays) and the one of a single layer, that runs under
checkpoints and FSDP2. The exact program orders the same tasks in the same memory. A second bound
holds for any order of all layers together, in any memory.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

from torch.fx import Graph

from benchmarks.exact_schedule import exact_schedule
from benchmarks.overlap import (
    MODELS,
    POLICIES,
    RANKS,
    SHARES,
    block_of,
    compiled,
    least_layer_us,
    print_head,
    with_communication,
)
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.node_cost import elapsed_us
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.solve.block_schedule import Block, peak_bytes, simulate
from sp_compiler.solve.list_schedule import ListSchedule


@dataclass(frozen=True)
class Search:
    """The search that found an order.

    Attributes:
        room_bytes: the limit that it was given.
    """

    block: Block
    room_bytes: int
    order: Sequence[int]


@dataclass(frozen=True)
class Gap:
    """An order compared with the exact program.

    Attributes:
        longer: by how much it can be longer than the shortest, at most.
        proven: whether the exact program proved how long that is.
        schedule_s: CPU time of the search for the order.
        exact_s: CPU time of the exact program, which runs on two threads.
    """

    longer: float
    proven: bool
    schedule_s: float
    exact_s: float


def compiled_with_searches(
    name: str, recompute: str, device: Hardware
) -> tuple[PlannedProgram, list[Search]]:
    """Compile a model; return also the thorough searches for orders."""
    searches: list[Search] = []
    plain = ListSchedule.order

    def order(search: ListSchedule, limit_bytes: int, *, thorough: bool = False) -> list[int]:
        found = plain(search, limit_bytes, thorough=thorough)
        if thorough:
            searches.append(Search(search.block, limit_bytes, found))
        return found

    with mock.patch.object(ListSchedule, "order", order):
        program = compiled(name, recompute=recompute, hardware=device)
    return program, searches


def search_of(graph: Graph, searches: Sequence[Search], device: Hardware) -> Search | None:
    """Return the search that found the order of ``graph``; ``None`` if nothing in it can overlap.

    The graph does not say, but takes the time of that order to the last digits.
    """
    graph_us = elapsed_us(graph, RANKS, device)
    for search in searches:
        if math.isclose(simulate(search.block, search.order).time_us, graph_us, rel_tol=1e-12):
            return search
    return None


def gap_of(search: Search, seconds: float) -> Gap:
    """Compare an order with the exact program."""
    again = ListSchedule(search.block)
    begun_s = time.process_time()
    again.order(search.room_bytes, thorough=True)
    scheduled_s = time.process_time()
    # Budgets rely on the peak of the order that was compared, where that is larger.
    compared_bytes = peak_bytes(search.block, again.order(search.room_bytes))
    limit_bytes = max(search.room_bytes, compared_bytes)
    exact_begun_s = time.process_time()
    exact = exact_schedule(search.block, limit_bytes, search.order, seconds)
    exact_s = time.process_time() - exact_begun_s
    # Sums of the same times in another order may differ in the last digits.
    longer = max(0.0, simulate(search.block, search.order).time_us / exact.least_us - 1)
    return Gap(longer, exact.proven, scheduled_s - begun_s, exact_s)


def gaps(name: str, recompute: str, device: Hardware, seconds: float) -> Iterator[tuple[str, Gap]]:
    """Compile a model; compare the backward of a layer in the middle, and that of a single one."""
    program, searches = compiled_with_searches(name, recompute, device)
    own = block_of(program).partitioned
    for kind, graph in (("in a step", own.middle_backward), ("alone", own.backward)):
        assert graph is not None
        found = search_of(graph, searches, device)
        assert found is not None
        yield kind, gap_of(found, seconds)


def longer_than_joint(name: str, recompute: str, device: Hardware) -> float:
    """Return by how much a backward in the middle can be longer than in the best order of all
    layers together, at most."""
    ways = {
        on: block_of(compiled(name, recompute=recompute, hardware=device, overlap=on))
        for on in (True, False)
    }
    graph = ways[True].partitioned.middle_backward
    assert graph is not None
    return max(0.0, elapsed_us(graph, RANKS, device) / least_layer_us(ways[False], device) - 1)


def print_rows(name: str, recompute: str, seconds: float) -> None:
    """Print a line for each kind of backward, over all links."""
    parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    devices = [with_communication(share, [parts.forward, parts.backward]) for share in SHARES]
    found: dict[str, list[Gap]] = {}
    for device in devices:
        for kind, gap in gaps(name, recompute, device, seconds):
            found.setdefault(kind, []).append(gap)
    jointly = max(longer_than_joint(name, recompute, device) for device in devices)
    for kind, of_kind in found.items():
        proven = [gap for gap in of_kind if gap.proven]
        cells = [name, recompute, kind, f"{len(proven)} of {len(of_kind)}"]
        cells.append(f"{max(gap.longer for gap in of_kind):.2%}")
        cells.append(f"{jointly:.2%}" if kind == "in a step" else "")
        cells.append(f"{max(gap.schedule_s for gap in of_kind):.2f} s")
        cells.append(f"{max(gap.exact_s for gap in of_kind):.0f} s")
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of one program")
    options = parser.parse_args()
    print_head(
        "model", "recompute", "backward", "proven", "longer than the shortest, at most",
        "than any order of all layers, at most", "schedule", "exact program",
    )  # fmt: skip
    for name in options.models:
        for recompute in POLICIES:
            print_rows(name, recompute, options.seconds)


if __name__ == "__main__":
    main()
