"""Microbatches that a stage runs with less recomputation than the others.

A stage has several microbatches in flight, and memory is left where fewer would fill it. As many of
them as fit keep all that ``recompute`` keeps; the others are run by a second program, of
``recompute_rest`` (Korthikanti et al., arXiv 2205.05198, appendix C)::

    rank 0 of 1F1B    F0 F1 F2 F3 B0 F4 B1 F5 ...
    keeps most        0  1        -  4  -  5       two at a time
    recomputes              2  3

A microbatch keeps most if a place is free when its forward begins. So what a stage does follows
from its schedule and from the number of its places, and is the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from sp_compiler.base.errors import ArgumentError
from sp_compiler.pipeline_parallel.schedules import Action
from sp_compiler.pipeline_parallel.stage_memory import RankActivations, StageMemory
from sp_compiler.planning.data import CallPlan, ParameterSize

Parts = Sequence[Sequence[CallPlan]]
"""The calls of every stage."""


def cut(calls: Sequence[CallPlan], ends: Sequence[int]) -> Parts:
    """Return the calls of every stage; each ends in front of one of ``ends``."""
    return [calls[start:end] for start, end in itertools.pairwise([0, *ends])]


def require_memory(recompute_rest: str | None, memory: object) -> None:
    """Raise :class:`ArgumentError` where nothing says how many microbatches fit."""
    if recompute_rest is not None and memory is None:
        raise ArgumentError(
            f"recompute_rest={recompute_rest!r} without memory=: give the limit of each stage, for "
            'example memory="80GiB"; as many microbatches as fit run with recompute='
        )


def with_places(order: Sequence[Action], places: int) -> frozenset[int]:
    """Return the microbatches that keep most.

    Args:
        order: actions of one stage.
        places: how many of those in flight may.
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


def most_places(
    order: Sequence[Action], most: StageMemory, rest: StageMemory, room_bytes: float
) -> frozenset[int]:
    """Return the microbatches that keep most, as many at a time as ``room_bytes`` holds.

    Args:
        order: actions of one stage.
        most: of a microbatch that keeps most.
        rest: of one that does not.
        room_bytes: for activations.
    """
    chosen = tried = with_places(order, 0)
    for places in itertools.count(1):
        before, tried = tried, with_places(order, places)
        # More places than microbatches in flight change nothing.
        if tried == before:
            return chosen
        # Not the first that does not fit ends the search: recomputing takes memory too, in
        # backward, and without it more microbatches may fit than with a little.
        if activations(order, most, rest, tried).peak_bytes <= room_bytes:
            chosen = tried
    raise AssertionError


def activations(
    order: Sequence[Action], most: StageMemory, rest: StageMemory, chosen: frozenset[int]
) -> RankActivations:
    """Return what one stage has in a step in which the microbatches ``chosen`` keep most."""
    return RankActivations.of(order, lambda action: most if action.microbatch in chosen else rest)


def saving_microbatches(
    orders: Sequence[Sequence[Action]],
    parts: Parts,
    rest: Parts,
    sizes: Mapping[str, ParameterSize],
    memory_bytes: int,
    state_bytes: Callable[[ParameterSize], float],
) -> list[frozenset[int]]:
    """Return for every stage the microbatches that keep most.

    Args:
        orders: of every rank.
        parts: with ``recompute``.
        rest: with ``recompute_rest``.
        sizes: of the parameters, on one rank.
        memory_bytes: limit of each stage.
        state_bytes: of a parameter with its gradient and optimizer state.
    """
    chosen = []
    for stage, (own, other) in enumerate(zip(parts, rest, strict=True)):
        used = {name for call in own for name in call.parameters}
        room_bytes = memory_bytes - sum(state_bytes(sizes[name]) for name in used)
        order = [action for rank in orders for action in rank if action.stage == stage]
        chosen.append(most_places(order, StageMemory.of(own), StageMemory.of(other), room_bytes))
    return chosen
