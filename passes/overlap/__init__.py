"""Overlap of collectives with work that does not depend on them.

A collective is started, work that does not depend on it runs, and the first user of its result
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
(:func:`sp_compiler.cost.step_memory.functions_room`), and only as much of it is used as shortens
the step. With consecutive calls of a region, each backward may recompute in advance for the call
before it what would expose communication there (recompute prefetch, :mod:`.look_ahead`), or leave
it weight gradients that hide some (deferred weight gradients, :mod:`.hand_over`).

Nodes keep their meta; a ``wait`` gets that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.fx import Graph

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.cost.step_memory import Room
from sp_compiler.ir.forward_backward import LookAhead, Partitioned, SplitBackward
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.passes.overlap.compare import (
    PARTS_BEYOND,
    WORTH_MORE_FUNCTIONS,
    WORTH_MORE_MEMORY,
    quickest_of,
)
from sp_compiler.passes.overlap.hand_over_choice import hand_over
from sp_compiler.passes.overlap.look_ahead import look_aheads
from sp_compiler.passes.overlap.orders import Schedule, Unordered, overlapped
from sp_compiler.solve.list_schedule import ListSchedule

# A forward that can overlap less kernel time than this, relative to the time of its collectives,
# stays as it is: it gains next to nothing, and reads like the model.
_WORTH_STARTING = 0.1


def overlap_collectives(
    parts: Partitioned,
    own_parameters: Collection[int],
    sizes: Sizes | None = None,
    room: Room | None = None,
    hardware: Hardware = H100,
    *,
    in_a_row: bool = False,
    fused: bool = False,
    thorough: bool = True,
) -> Partitioned:
    """Return a copy of ``parts`` whose forward and backwards overlap work with collectives.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        sizes: the open sizes; memory and time are computed for the example's.
        room: allowed peaks of forward and backward, if they are above their own.
        hardware: profile for estimated times.
        in_a_row: whether calls of the region follow each other, so that a backward may recompute
            for the call before, or defer gradients to it.
        fused: whether elementwise operators cost what they do in fused kernels
            (:mod:`sp_compiler.cost.fused_kernels`).
        thorough: whether to search longer, for functions that will run and are not only compared.
    """
    room = room or Room()
    of_forward = room.forward_bytes, hardware, _WORTH_STARTING
    forward = overlapped(parts.forward, (), sizes, *of_forward, fused=fused, thorough=thorough)
    parts = replace(parts, forward=forward)
    if parts.backward is None:
        return parts
    loss, split = parts.loss, parts.split
    alone = Unordered.of(parts.backward, own_parameters, sizes, hardware, fused=fused)
    in_a_row = in_a_row and loss is None
    cuts = look_aheads(parts.backward, len(parts.saved)) if in_a_row else ()
    ways = [(alone.with_graph(cut.both), cut) for cut in cuts]
    # The cuts first: without them recomputation leaves long chains.
    room_bytes = _least_room_bytes([*(both.search for both, _ in ways), alone.search], room)
    backward = alone.scheduled(room_bytes)
    ahead = _look_ahead(ways, backward, room_bytes)

    def ordered(graph: Graph, own_parameters: Collection[int]) -> Graph:
        within = own_parameters, sizes, room_bytes, hardware
        return overlapped(graph, *within, fused=fused, thorough=thorough)

    if loss is not None:
        loss = replace(loss, backward=ordered(loss.backward, own_parameters))
    if split is not None:
        # This half returns no gradients of parameters, so none are exempt from the peak.
        inputs = ordered(split.inputs, ())
        split = SplitBackward(inputs, ordered(split.weights, own_parameters))
    elif in_a_row:
        best = backward if ahead is None else ahead.ordered
        split = hand_over(parts, alone, best, room)
    looks_ahead = ahead.functions() if ahead is not None and split is None else None
    # Also if other functions replace it in a step: checkpoints and FSDP2 run it alone.
    backward_graph = alone.scheduled(room_bytes, thorough=thorough).graph()
    return replace(parts, backward=backward_graph, loss=loss, split=split, ahead=looks_ahead)


class _Ahead(NamedTuple):
    """A :class:`LookAhead` whose function of two calls, ``both``, is in the order ``ordered``."""

    recompute: Unordered
    rest: Unordered
    both: Unordered
    ordered: Schedule

    def functions(self) -> LookAhead:
        """Return the graphs in good orders, and report them."""
        report_of(Pass.OVERLAP).rewrote(kind="look_ahead")
        room_bytes = self.ordered.room_bytes
        recompute, rest = (
            each.scheduled(room_bytes).graph() for each in (self.recompute, self.rest)
        )
        return LookAhead(recompute, rest, self.both.scheduled(room_bytes, thorough=True).graph())


def _least_room_bytes(ways: Sequence[ListSchedule], room: Room) -> int:
    """Return how much of ``room`` makes a backward about as fast as all of it does; the last of
    ``ways`` counts even if it does not fit."""
    beyond_bytes = room.most_bytes - room.backward_bytes
    if beyond_bytes <= 0 or not ways[-1].block.wait_of:
        return room.backward_bytes
    least_us = min(each.least_us for each in ways)
    times_us: dict[int, float] = {}
    for part in range(PARTS_BEYOND + 1):
        limit_bytes = room.backward_bytes + beyond_bytes * part // PARTS_BEYOND
        fitting = [
            each for each in ways if each is ways[-1] or each.block.given_bytes <= limit_bytes
        ]
        times_us[limit_bytes] = quickest_of(fitting, limit_bytes).quick_us(limit_bytes)
        if times_us[limit_bytes] <= (1 + WORTH_MORE_MEMORY) * least_us:
            break
    worth_us = (1 + WORTH_MORE_MEMORY) * min(times_us.values())
    return next(limit_bytes for limit_bytes, us in times_us.items() if us <= worth_us)


def _look_ahead(
    ways: Sequence[tuple[Unordered, LookAhead]], alone: Schedule, room_bytes: int
) -> _Ahead | None:
    """Return the cut of a backward that hides most communication, scheduled; ``None`` if none is
    much better than ``alone``.

    Args:
        ways: cuts, each with its function of two calls.
    """
    worth_us = (1 - WORTH_MORE_FUNCTIONS) * alone.time_us
    # Memory comes first, including that of values passed between the calls.
    ways = [(both, cut) for both, cut in ways if both.given_bytes <= room_bytes]
    if worth_us < alone.compute_us or not ways:
        return None
    quickest = quickest_of([both.search for both, _ in ways], room_bytes)
    both, cut = next(way for way in ways if way[0].search is quickest)
    # The first function returns no gradients: recomputed values take their place.
    costs = both.sizes, both.hardware
    recompute = Unordered.of(cut.recompute, (), *costs, fused=both.fused)
    rest = both.with_graph(cut.rest)
    ordered = both.scheduled(room_bytes)
    if ordered.time_us > worth_us or max(recompute.given_bytes, rest.given_bytes) > room_bytes:
        return None
    return _Ahead(recompute, rest, both, ordered)
