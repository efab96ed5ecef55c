"""Overlap of collectives with work that does not depend on them.

A collective is started, work runs on which it does not depend, and the first user of its result
waits for it::

    grad_w = mm(t(g), x)             grad_x = mm(g, w)
    grad_x = mm(g, w)          ->    started = convert(grad_x, P, S(0))
    grad_x = convert(...)            grad_w = mm(t(g), x)
    ... grad_x ...                   arrived = wait(started)
                                     ... arrived ...

This is the order of Megatron-LM's linear layers (Korthikanti et al. 2022, section 4.2.2). A forward
has such work if branches of a layer are parallel, such as attention and MLP after one norm, or if
:mod:`sp_compiler.passes.half_batches` has split one chain into two. Estimated times decide what
overlaps: weight gradients, recomputation and operands of other collectives run where a collective
would leave the rank idle, and a saved shard is gathered as late as its communication can still be
hidden (:mod:`sp_compiler.solve.list_schedule`). Memory has a limit
(:func:`sp_compiler.cost.step_memory.functions_room`), and of it no more is taken than shortens the
step. Of calls in a row, each may recompute for the one before it what would expose communication
there (:mod:`.look_ahead`), or leave it gradients of weights that hide some (:mod:`.hand_over`).

Nodes keep their meta; a ``wait`` gets that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from torch.fx import Graph

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.cost.step_memory import Room
from sp_compiler.ir.forward_backward import LookAhead, Partitioned, SplitBackward
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.passes.overlap.hand_over import leavable, without
from sp_compiler.passes.overlap.look_ahead import look_aheads
from sp_compiler.passes.overlap.orders import Schedule, Unordered, overlapped

# A forward whose collectives have less beside them, in relation to their time, stays as it is: it
# gains next to nothing and reads as the model does.
_WORTH_STARTING = 0.1
# Part of a backward's time, 2 % of a tenth that is communication. Below it three more functions to
# compile and to read gain too little.
_WORTH_LOOKING_AHEAD = 0.002
# Memory beyond the step's own peak is taken in so many parts, as few as make a backward as fast as
# all of them, but for this share of its time: of 10 % communication that is 1 %.
_PARTS_BEYOND, _WORTH_MORE = 4, 0.001
_ROUNDING = 1e-6  # of sums of the same times in another order


def overlap_collectives(
    parts: Partitioned,
    own_parameters: Collection[int],
    sizes: Sizes | None = None,
    room: Room | None = None,
    hardware: Hardware = H100,
    *,
    in_a_row: bool = False,
) -> Partitioned:
    """Return a copy of ``parts`` whose forward and backwards overlap work with collectives.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        sizes: the open sizes; memory and time are computed for the example's.
        room: allowed peaks of forward and backward, if they are above their own.
        hardware: profile for estimated times.
        in_a_row: whether calls of the region follow each other, so that a backward may recompute
            for the call before, or leave it gradients.
    """
    room = room or Room()
    forward = overlapped(parts.forward, (), sizes, room.forward_bytes, hardware, _WORTH_STARTING)
    parts = replace(parts, forward=forward)
    if parts.backward is None:
        return parts
    loss, split = parts.loss, parts.split
    unordered = partial(Unordered.of, sizes=sizes, hardware=hardware)
    alone = unordered(parts.backward, own_parameters)
    in_a_row = in_a_row and loss is None
    cuts = look_aheads(parts.backward, len(parts.saved)) if in_a_row else ()
    ways = [(unordered(cut.both, own_parameters), cut) for cut in cuts]
    # The cuts first: without them recomputation leaves long chains.
    room_bytes = _least_room_bytes([*(both for both, _ in ways), alone], room)
    backward = alone.scheduled(room_bytes)
    ahead = _look_ahead(ways, backward, own_parameters, sizes, room_bytes, hardware)
    wanted = own_parameters, sizes, room_bytes, hardware
    if loss is not None:
        loss = replace(loss, backward=overlapped(loss.backward, *wanted))
    if split is not None:
        # This half returns no gradients of parameters, so none are exempt from the peak.
        inputs = overlapped(split.inputs, (), *wanted[1:])
        split = SplitBackward(inputs, overlapped(split.weights, *wanted))
    elif in_a_row:
        best = backward if ahead is None else ahead.both
        split = _hand_over(parts, best, own_parameters, room, unordered)
    backward_graph = backward.graph()
    looks_ahead = ahead.functions() if ahead is not None and split is None else None
    return replace(parts, backward=backward_graph, loss=loss, split=split, ahead=looks_ahead)


class _Ahead(NamedTuple):
    """A :class:`LookAhead` whose function of two calls is scheduled, in ``room_bytes``."""

    recompute: Unordered
    rest: Unordered
    both: Schedule
    room_bytes: int

    def functions(self) -> LookAhead:
        """Return the graphs in good orders, and report them."""
        report_of(Pass.OVERLAP).rewrote(kind="look_ahead")
        others = (self.recompute, self.rest)
        recompute, rest = (each.scheduled(self.room_bytes).graph() for each in others)
        return LookAhead(recompute, rest, self.both.graph())


def _least_room_bytes(ways: Sequence[Unordered], room: Room) -> int:
    """Return how much of ``room`` makes a backward about as fast as all of it; the last of ``ways``
    counts also where it fits in none."""
    beyond_bytes = room.most_bytes - room.backward_bytes
    if beyond_bytes <= 0 or not ways[-1].tasks.block.wait_of:
        return room.backward_bytes
    least_us = min(each.least_us for each in ways)
    times_us: dict[int, float] = {}
    for part in range(_PARTS_BEYOND + 1):
        limit_bytes = room.backward_bytes + beyond_bytes * part // _PARTS_BEYOND
        fitting = [each for each in ways if each is ways[-1] or each.given_bytes <= limit_bytes]
        times_us[limit_bytes] = _quickest(fitting, limit_bytes).quick_us(limit_bytes)
        if times_us[limit_bytes] <= (1 + _WORTH_MORE) * least_us:
            break
    worth_us = (1 + _WORTH_MORE) * min(times_us.values())
    return next(limit_bytes for limit_bytes, us in times_us.items() if us <= worth_us)


def _quickest(ways: Sequence[Unordered], room_bytes: int) -> Unordered:
    """Return the way that takes least time; of equal ones the first."""
    quickest = ways[0]
    for each in ways[1:]:
        # Most need no schedule: one before them takes the time of all kernels.
        if each.least_us * (1 + _ROUNDING) < quickest.quick_us(room_bytes):
            quickest = min(quickest, each, key=lambda way: way.quick_us(room_bytes))
    return quickest


def _look_ahead(
    ways: Sequence[tuple[Unordered, LookAhead]],
    alone: Schedule,
    own_parameters: Collection[int],
    sizes: Sizes | None,
    room_bytes: int,
    hardware: Hardware,
) -> _Ahead | None:
    """Return the cut of a backward that hides most, scheduled; ``None`` if none is much better than
    ``alone``.

    Args:
        ways: cuts, each with its function of two calls.
    """
    worth_us = (1 - _WORTH_LOOKING_AHEAD) * alone.time_us
    # Memory comes first, also that of what is handed over.
    ways = [(both, cut) for both, cut in ways if both.given_bytes <= room_bytes]
    if worth_us < alone.compute_us or not ways:
        return None
    both = _quickest([both for both, _ in ways], room_bytes)
    cut = next(cut for each, cut in ways if each is both)
    # The first returns no gradients: recomputed values stand in their place.
    recompute = Unordered.of(cut.recompute, (), sizes, hardware)
    rest = Unordered.of(cut.rest, own_parameters, sizes, hardware)
    ordered = both.scheduled(room_bytes)
    if ordered.time_us > worth_us or max(recompute.given_bytes, rest.given_bytes) > room_bytes:
        return None
    return _Ahead(recompute, rest, ordered, room_bytes)


class _Left(NamedTuple):
    """A backward without the gradients of the inputs ``late``, and its function of two calls."""

    late: frozenset[int]
    both: Unordered
    split: SplitBackward


def _hand_over(
    parts: Partitioned,
    best_so_far: Schedule,
    own_parameters: Collection[int],
    room: Room,
    unordered: Callable[[Graph, Collection[int]], Unordered],
) -> SplitBackward | None:
    """Return the backward that leaves gradients to the call before, scheduled; ``None`` if that is
    not much better than ``best_so_far``."""
    worth_us = (1 - _WORTH_LOOKING_AHEAD) * best_so_far.time_us
    if worth_us < best_so_far.compute_us:
        return None
    most_bytes = max(room.backward_bytes, room.behind_bytes)

    # Growing from either end meets some sets twice.
    @cache
    def leaving(late: frozenset[int]) -> _Left | None:
        split = without(parts, late)
        if split is None or split.both is None:
            return None
        both = unordered(split.both, own_parameters)
        return _Left(late, both, split) if both.given_bytes <= most_bytes else None

    singles = [
        way for index in leavable(parts, own_parameters) if (way := leaving(frozenset({index})))
    ]
    singles = [way for way in singles if way.both.least_us < worth_us]
    if not singles:
        return None
    promising = sorted(singles, key=lambda way: (way.both.least_us, way.both.given_bytes))
    ways = [_grown(promising, most_bytes, leaving)]
    if ways[0].both.quick_us(most_bytes) > (1 + _WORTH_MORE) * best_so_far.compute_us:
        ways.append(_grown(singles[::-1], most_bytes, leaving))
        # The bound tells what a search may find, which the quick walk does not always.
        ways = [min(ways, key=lambda way: way.both.quick_us(most_bytes)), promising[0]]
    (_, both, split), ordered = _fastest(ways, most_bytes)
    if ordered.time_us > worth_us:
        quickest = _quickest([way.both for way in singles], most_bytes)
        own = [way for way in singles if way.both is quickest]
        (_, both, split), ordered = _fastest(own, most_bytes)
    if ordered.time_us > worth_us:
        return None
    room_bytes = max(both.given_bytes, room.backward_bytes)
    if ordered.peak_bytes > room_bytes:
        ordered = _in_least_room(both, ordered, room)
        room_bytes = max(room_bytes, ordered.peak_bytes)
    weights = unordered(split.weights, own_parameters)
    if weights.given_bytes > room_bytes:
        return None
    report_of(Pass.OVERLAP).rewrote(kind="hand_over")
    inputs = ordered.of_last_calls(split.inputs)
    return SplitBackward(inputs, weights.scheduled(room_bytes).graph(), ordered.graph())


def _fastest(ways: Sequence[_Left], room_bytes: int) -> tuple[_Left, Schedule]:
    """Return the way that takes least time, scheduled."""
    schedules = {way.both: way.both.scheduled(room_bytes) for way in dict.fromkeys(ways)}
    best = min(ways, key=lambda way: schedules[way.both].time_us)
    return best, schedules[best.both]


def _grown(
    singles: Sequence[_Left],
    most_bytes: int,
    leaving: Callable[[frozenset[int]], _Left | None],
) -> _Left:
    """Return the first of ``singles`` with each of the others that makes it quicker."""
    # One after the other: n gradients have 2^n sets. An exhaustive search found none that hides 6 %
    # more of the communication of the models in docs/overlap.md.
    best = singles[0]
    for single in singles[1:]:
        best_us = best.both.quick_us(most_bytes)
        if best_us <= (1 + _ROUNDING) * best.both.tasks.block.compute_us:
            break
        more = leaving(best.late | single.late)
        if more is not None and more.both.quick_us(most_bytes) < (1 - _ROUNDING) * best_us:
            best = more
    return best


def _in_least_room(both: Unordered, ordered: Schedule, room: Room) -> Schedule:
    """Return a schedule about as fast as ``ordered``, which may take all of ``room``, in as few
    parts of it as possible."""
    enough_us = (1 + _WORTH_MORE) * ordered.time_us
    beyond_bytes = room.behind_bytes - room.backward_bytes
    schedules = {_PARTS_BEYOND: ordered}

    # Full searches: what a quick walk finds in less memory says little about what they find.
    def is_enough(part: int) -> bool:
        limit_bytes = room.backward_bytes + beyond_bytes * part // _PARTS_BEYOND
        schedules[part] = both.scheduled(limit_bytes)
        return schedules[part].time_us <= enough_us

    least = bisect_left(range(_PARTS_BEYOND), True, key=is_enough)
    return schedules[least]
