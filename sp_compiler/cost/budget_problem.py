"""Plain data for the memory budget's solver, from a program and the candidate splits of its
regions.

It comes from the same walk as :mod:`sp_compiler.cost.step_memory`, so that the solver's peak equals
the plan's to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sp_compiler.base.storage import Storage
from sp_compiler.cost.step_walk import CallStorages, Holders, StepWalk
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.program import Program
from sp_compiler.solve.memory_budget import CallSplits, Sent, Shared, Split


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
    """Return one entry per call, with one split for each split of its region.

    A call that no gradient reaches has only the first split: what it saves is live until the end.

    Args:
        program: sharded.
        splits: by region name; those that send something to the host come last.
        differentiable: by region name, for each output whether a gradient flows through it.
        world_size: number of tensor-parallel ranks.
    """
    # One walk, with the first split of each region, is enough: only what calls save depends on the
    # split, and the walk below leaves that out.
    first_splits = {name: each[0].partitioned for name, each in splits.items()}
    walk = StepWalk(program, first_splits, differentiable, world_size)
    events = list(walk.events())
    calls = range(len(program.calls))
    idle = set(calls) - {e.call for e in events if e.kind == "run" and e.phase == "backward"}
    before: list[set[Shared]] = [set() for _ in calls]
    after: list[set[Shared]] = [set() for _ in calls]
    behind: list[set[Shared]] = [set() for _ in calls]
    inside: list[set[Shared]] = [set() for _ in calls]
    holders = Holders()
    for event in events:
        if event.kind == "run":
            (before if event.phase == "forward" else inside)[event.call].add(holders.live())
        # What a call saves is counted by the split that is chosen; idle calls have no choice.
        elif not event.saved or event.call in idle:
            holders.apply(event)
            # The peak may be right after a function, when all of its results exist.
            if event.kind == "hold":
                (after if event.phase == "forward" else behind)[event.call].add(holders.live())
    # Several calls may save one of these (a mask, a rotary table): to count it once, the solver has
    # to know its identity. Everything else that a call saves is its own: the bytes suffice.
    made = {storage for call in walk.storages for storage in call.outputs if storage is not None}
    made.update(walk.written_buffers.values())
    return [
        CallSplits(
            (_idle(splits[call.region.name][0]),)
            if index in idle
            else tuple(
                _split(split, walk.storages_of(index, split.partitioned), made)
                for split in splits[call.region.name]
                # After the last call nothing runs while something could go to the host.
                if not split.partitioned.sent_bytes or index < calls[-1]
            ),
            frozenset(before[index]),
            frozenset(after[index]),
            frozenset(inside[index]),
            frozenset(behind[index]),
        )
        for index, call in enumerate(program.calls)
    ]


def _split(split: RegionSplit, storages: CallStorages, made: set[Storage]) -> Split:
    """Sizes of a call with this split; ``made`` are results of calls, which others may save."""
    saved, sent = (set(filter(None, each)) for each in (storages.saved, storages.sent))
    return Split(
        time_us=split.time_us,
        own_bytes=sum(storage.num_bytes for storage in saved - made),
        shared=frozenset(saved & made),
        forward_bytes=split.forward_peak_bytes,
        backward_bytes=split.backward_peak_bytes,
        sent=Sent(sum(storage.num_bytes for storage in sent - made), frozenset(sent & made)),
    )


def _idle(split: RegionSplit) -> Split:
    # What an idle call saves lives from its forward to the end: it is already in the sets of live
    # storages of all later calls.
    return Split(0.0, 0, Shared(), split.forward_peak_bytes, split.backward_peak_bytes)
