"""From a program and ways to split its regions to the plain data of the memory budget's solver.

Read off the same walk as :mod:`sp_compiler.cost.step_memory`, so that a sum over the right entries
is the peak of the plan, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sp_compiler.base.storage import Storage
from sp_compiler.cost.step_walk import Holders, StepWalk
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.program import Program
from sp_compiler.solve.memory_budget import CallSplits, Shared, Split


class RegionSplit(Protocol):
    """One way to split a region: :class:`sp_compiler.passes.memory.candidates.Candidate`."""

    @property
    def partitioned(self) -> Partitioned: ...
    @property
    def time_us(self) -> float: ...
    @property
    def forward_peak_bytes(self) -> int: ...
    @property
    def backward_peak_bytes(self) -> int: ...


def budget_problem(
    program: Program,
    splits: Mapping[str, Sequence[RegionSplit]],
    differentiable: Mapping[str, Sequence[bool]],
    world_size: int,
) -> list[CallSplits]:
    """Return one entry per call, with a split for each of its region's.

    A call that no gradient reaches has one split, the first: what it saves stays to the end.

    Args:
        program: sharded.
        splits: by region name.
        differentiable: by region name, for each output whether a gradient flows through it.
        world_size: number of tensor-parallel ranks.
    """
    # What lives apart from what is saved is the same however the regions are split.
    first = {name: each[0].partitioned for name, each in splits.items()}
    walk = StepWalk(program, first, differentiable, world_size)
    events = list(walk.events())
    calls = range(len(program.calls))
    idle = set(calls) - {e.call for e in events if e.kind == "run" and e.phase == "backward"}
    before: list[set[Shared]] = [set() for _ in calls]
    after: list[set[Shared]] = [set() for _ in calls]
    inside: list[set[Shared]] = [set() for _ in calls]
    holders = Holders()
    for event in events:
        if event.kind == "run":
            (before if event.phase == "forward" else inside)[event.call].add(holders.live())
        # What the splits save is theirs to count, but for calls that have no choice.
        elif not event.saved or event.call in idle:
            holders.apply(event)
            if event.kind == "hold":
                after[event.call].add(holders.live())
    made = {storage for frame in walk.frames for storage in frame.outputs if storage is not None}
    return [
        CallSplits(
            (_idle(splits[call.region.name][0]),)
            if index in idle
            else tuple(
                _split(split, {*filter(None, walk.frame(index, split.partitioned).saved)}, made)
                for split in splits[call.region.name]
            ),
            frozenset(before[index]),
            frozenset(after[index]),
            frozenset(inside[index]),
        )
        for index, call in enumerate(program.calls)
    ]


def _split(split: RegionSplit, saved: set[Storage], made: set[Storage]) -> Split:
    """Sizes of a call split like this; ``made`` are results of calls, which others may save."""
    return Split(
        time_us=split.time_us,
        own_bytes=sum(storage.num_bytes for storage in saved - made),
        shared=frozenset(saved & made),
        forward_bytes=split.forward_peak_bytes,
        backward_bytes=split.backward_peak_bytes,
    )


def _idle(split: RegionSplit) -> Split:
    # What an idle call saves lives from its forward on: it is in the sets of the others already.
    return Split(0.0, 0, Shared(), split.forward_peak_bytes, split.backward_peak_bytes)
