"""What is live at every moment of a step whatever its calls keep, and what each way to split adds.

Made of the same walk as :mod:`sp_compiler.cost.memory`, so that a sum over the right entries is the
peak of the plan, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sp_compiler.base.storage import Storage
from sp_compiler.cost.memory import Frame, Phase, Step
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.solve.memory_budget import Stop, Way


class Split(Protocol):
    """One way to split a region: :class:`sp_compiler.passes.memory.candidates.Variant`."""

    @property
    def partitioned(self) -> Partitioned: ...
    @property
    def time_us(self) -> float: ...
    @property
    def forward_peak_bytes(self) -> int: ...
    @property
    def backward_peak_bytes(self) -> int: ...


def stops(compiled: CompiledProgram, splits: Mapping[str, Sequence[Split]]) -> list[Stop]:
    """One for each call, with a way for each split of its region.

    A call that no gradient reaches has one way, the first.

    Args:
        compiled: its regions are split in the first way.
        splits: by region name.
    """
    idle = _Walk(compiled, frozenset()).finish().idle
    walk = _Walk(compiled, frozenset(idle)).finish()
    made = {storage for frame in walk.frames for storage in frame.outputs}
    found = []
    for index, call in enumerate(compiled.program.calls):
        choices = splits[call.region.name]
        ways = [
            _way(split, walk.kept(index, split.partitioned), made, index in idle)
            for split in (choices[:1] if index in idle else choices)
        ]
        seen = walk.seen[index]
        found.append(
            Stop(tuple(ways), frozenset(seen.before), frozenset(seen.after), frozenset(seen.inside))
        )
    return found


def _way(split: Split, kept: set[Storage], made: set[Storage | None], idle: bool) -> Way:
    own = 0 if idle else sum(storage.num_bytes for storage in kept - made)
    return Way(
        time_us=0.0 if idle else split.time_us,
        own_bytes=own,
        shared=frozenset() if idle else frozenset(kept & made),
        forward_bytes=split.forward_peak_bytes,
        backward_bytes=split.backward_peak_bytes,
    )


@dataclass
class _Seen:
    """Sets of live storages, as in :class:`sp_compiler.solve.memory_budget.Stop`."""

    before: set[frozenset[Storage]] = field(default_factory=set)
    after: set[frozenset[Storage]] = field(default_factory=set)
    inside: set[frozenset[Storage]] = field(default_factory=set)


class _Walk(Step):
    """A step in which nothing is kept for backward but by the calls ``holding``."""

    def __init__(self, compiled: CompiledProgram, holding: frozenset[int]) -> None:
        super().__init__(compiled)
        self.holding = holding
        self.idle = set(range(len(self.program.calls)))
        self.seen = [_Seen() for _ in self.program.calls]

    def finish(self) -> _Walk:
        self.run()
        return self

    def kept(self, index: int, parts: Partitioned) -> set[Storage]:
        """What call ``index`` keeps, split like ``parts``."""
        return {storage for storage in self._frame(index, parts).saved if storage is not None}

    def _enter(self, index: int, kind: Phase, extra_bytes: int) -> None:
        super()._enter(index, kind, extra_bytes)
        if kind == "backward":
            self.idle.discard(index)
            self.seen[index].inside.add(self._live())
        else:
            self.seen[index].before.add(self._live())

    def _reach(self) -> None:
        self.seen[self.timeline[-1].call].after.add(self._live())

    def _live(self) -> frozenset[Storage]:
        return frozenset(storage for storage, count in self.holders.items() if count)

    def _keep(self, index: int, frame: Frame) -> None:
        if index in self.holding:
            super()._keep(index, frame)

    def _drop(self, index: int, frame: Frame) -> None:
        pass
