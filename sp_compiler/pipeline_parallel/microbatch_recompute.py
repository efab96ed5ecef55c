"""Microbatches that a stage runs with less recomputation than the others.

A stage has several microbatches in flight. If not all of them fit into memory with what
``recompute`` keeps, as many as fit keep that; the others run a second program, compiled with
``recompute_rest`` (Korthikanti et al., arXiv 2205.05198, appendix C)::

    rank 0 of 1F1B    F0 F1 F2 F3 B0 F4 B1 F5 ...
    keeps most        0  1        -  4  -  5       two at a time
    recomputes              2  3

A microbatch keeps most if a place is free when its forward begins. So the choice follows from the
schedule of the stage and its number of places, and is the same on every rank.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sp_compiler.base.errors import ArgumentError
from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    FULL_BACKWARD,
    Action,
)
from sp_compiler.pipeline_parallel.stage_memory import StageMemory
from sp_compiler.planning.data import CallPlan, ParameterSize

Parts = Sequence[Sequence[CallPlan]]
"""The calls of every stage."""


def cut(calls: Sequence[CallPlan], ends: Sequence[int]) -> Parts:
    """Return the calls of every stage; each ends before one of ``ends``."""
    return [calls[start:end] for start, end in itertools.pairwise([0, *ends])]


def require_memory(recompute_rest: str | None, memory: object) -> None:
    """Raise :class:`ArgumentError` if nothing says how many microbatches fit."""
    if recompute_rest is not None and memory is None:
        raise ArgumentError(
            f"recompute_rest={recompute_rest!r} without memory=: give the limit of each stage, for "
            'example memory="80GiB"; as many microbatches as fit run with recompute='
        )


def with_places(order: Sequence[Action], places: int) -> frozenset[int]:
    """Return the microbatches that keep most.

    Args:
        order: actions of one stage.
        places: number of microbatches in flight that may keep most.
    """
    now: set[int] = set()
    chosen: set[int] = set()
    for action in order:
        if action.starts and len(now) < places:
            now.add(action.microbatch)
            chosen.add(action.microbatch)
        elif action.ends:
            now.discard(action.microbatch)
    return frozenset(chosen)


class Places:
    """The numbers of places that one stage can have, and what it holds with each.

    Args:
        order: actions of the stage.
    """

    def __init__(self, order: Sequence[Action]) -> None:
        self.num_microbatches = sum(action.starts for action in order)
        chosen = with_places(order, 0)
        self._choices = [chosen]
        # More places than microbatches in flight change nothing.
        while (more := with_places(order, len(self._choices))) != chosen:
            self._choices.append(chosen := more)
        self._loads = [_largest_loads(order, chosen) for chosen in self._choices]

    @classmethod
    def of(cls, orders: Sequence[Sequence[Action]], num_stages: int) -> list[Places]:
        """Return those of every stage.

        Args:
            orders: actions of every rank.
        """
        own: list[list[Action]] = [[] for _ in range(num_stages)]
        for action in itertools.chain.from_iterable(orders):
            own[action.stage].append(action)
        return [cls(order) for order in own]

    def peaks_bytes(self, most: StageMemory, rest: StageMemory) -> Iterator[int]:
        """Yield the peak of activations with each number of places, from the largest down to 0.

        Args:
            most: memory of a microbatch that keeps most.
            rest: memory of one that does not.
        """
        for loads in reversed(self._loads):
            yield max(load.peak_bytes(most, rest) for load in loads)

    def most_that_fit(
        self, most: StageMemory, rest: StageMemory, room_bytes: float
    ) -> frozenset[int] | None:
        """Return the microbatches that keep most, as many at a time as ``room_bytes`` holds.

        ``None`` if no number of them fits, not even 0. Arguments as for :meth:`peaks_bytes`.
        """
        # From the largest down: recomputation takes memory in backward too, so a larger number may
        # fit where a smaller one does not.
        peaks = self.peaks_bytes(most, rest)
        for chosen, peak_bytes in zip(reversed(self._choices), peaks, strict=True):
            if peak_bytes <= room_bytes:
                return chosen
        return None


class _Load(NamedTuple):
    """An action, and what its stage holds of other microbatches meanwhile.

    Attributes:
        kind: kind of the action.
        recomputes: whether its microbatch keeps less.
        kept: number of others whose forward has run, those that keep most first.
        handed: number of others between the two functions of their backward, in the same order.
    """

    kind: Any
    recomputes: bool
    kept: tuple[int, int]
    handed: tuple[int, int]

    def peak_bytes(self, *memories: StageMemory) -> int:
        others = zip(memories, self.kept, self.handed, strict=True)
        return memories[self.recomputes].peak_bytes[self.kind] + sum(
            kept * memory.kept_bytes + handed * memory.handed_bytes
            for memory, kept, handed in others
        )

    def is_part_of(self, other: _Load) -> bool:
        counts = zip((*self.kept, *self.handed), (*other.kept, *other.handed), strict=True)
        return all(itertools.starmap(operator.le, counts))


def _largest_loads(order: Sequence[Action], chosen: frozenset[int]) -> list[_Load]:
    """Return the loads of a step that no other load contains.

    There are few of them, and a step is long: the search for a cut asks for many stages' peaks.
    """
    kept, handed = [0, 0], [0, 0]
    largest: dict[tuple[Any, bool], list[_Load]] = {}
    for action in order:
        kind, recomputes = action.kind, action.microbatch not in chosen
        if kind in (FULL_BACKWARD, BACKWARD_INPUTS):
            kept[recomputes] -= 1
        elif kind is BACKWARD_WEIGHTS:
            handed[recomputes] -= 1
        load = _Load(kind, recomputes, (kept[0], kept[1]), (handed[0], handed[1]))
        alike = largest.setdefault((kind, recomputes), [])
        if not any(map(load.is_part_of, alike)):
            alike[:] = [*(other for other in alike if not other.is_part_of(load)), load]
        if kind is FORWARD:
            kept[recomputes] += 1
        elif kind is BACKWARD_INPUTS:
            handed[recomputes] += 1
    return list(itertools.chain.from_iterable(largest.values()))


def saving_microbatches(
    places: Sequence[Places],
    parts: Parts,
    rest: Parts,
    sizes: Mapping[str, ParameterSize],
    memory_bytes: int,
    state_bytes: Callable[[ParameterSize], float],
) -> list[frozenset[int]]:
    """Return for every stage the microbatches that keep most.

    Args:
        places: the places of every stage.
        parts: calls with ``recompute``.
        rest: calls with ``recompute_rest``.
        sizes: sizes of the parameters on one rank.
        memory_bytes: limit of each stage.
        state_bytes: returns the bytes of a parameter with its gradient and optimizer state.
    """
    chosen = []
    for each, own, other in zip(places, parts, rest, strict=True):
        used = dict.fromkeys(name for call in own for name in call.parameters)
        room_bytes = memory_bytes - sum(state_bytes(sizes[name]) for name in used)
        fitting = each.most_that_fit(StageMemory.of(own), StageMemory.of(other), room_bytes)
        # None if inputs are larger than those of the cut: then keep as little as possible.
        chosen.append(fitting or frozenset())
    return chosen
