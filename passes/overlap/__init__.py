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
there (:mod:`.look_ahead`), or leave it a gradient of a weight that hides some (:mod:`.hand_over`).

Nodes keep their meta; a ``wait`` gets that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.cost.step_memory import Room
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import LookAhead, Partitioned, SplitBackward
from sp_compiler.ir.op_traits import is_part
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.ops.convert import WAIT
from sp_compiler.passes.overlap.hand_over import hand_overs
from sp_compiler.passes.overlap.look_ahead import look_aheads
from sp_compiler.passes.overlap.tasks import GraphTasks, graph_tasks
from sp_compiler.solve.block_schedule import Block, least_us, most_beside, peak_bytes, simulate
from sp_compiler.solve.list_schedule import list_schedule

_wait = WAIT.overload


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
    unordered = partial(_Unordered.of, sizes=sizes, hardware=hardware)
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


class Step(NamedTuple):
    """One step of a schedule: ``node`` runs or, with ``waits``, its collective is awaited."""

    node: Node
    waits: bool


@dataclass(frozen=True)
class _Schedule:
    """An order of the operators of ``given``, without ``steps`` its own.

    Attributes:
        blocking: collectives that are awaited at once.
        compute_us: time of all kernels.
        time_us: time of the order.
        peak_bytes: peak of the order.
    """

    given: Graph
    steps: Sequence[Step]
    blocking: Sequence[Node]
    compute_us: float
    time_us: float
    peak_bytes: int

    def graph(self) -> Graph:
        """Return a copy in this order, and report it; ``given`` itself if nothing overlaps."""
        for node in self.blocking:
            report_of(Pass.OVERLAP).decline(node, "nothing runs meanwhile in its memory")
        return _in_order(self.given, self.steps) if self.steps else self.given

    def of_last_calls(self, part: Graph) -> Graph:
        """Return ``part``, the last calls of ``given``, in their order here: ranks of which some
        run one and some the other meet in the same collectives."""
        pairs = zip(reversed(self.given.nodes), reversed(part.nodes), strict=False)
        twins = {node: twin for node, twin in pairs if twin.op == "call_function"}
        steps = [Step(twins[node], waits) for node, waits in self.steps if node in twins]
        return replace(self, given=part, steps=steps, blocking=()).graph()


@dataclass(frozen=True, eq=False)
class _Unordered:
    """A graph as tasks, of which any number of schedules can be made.

    Attributes:
        example: maps nodes of the copy with the example's sizes to those of ``graph``.
        given_bytes: peak of ``graph`` in its own order, below which no limit can be met.
        quick_times_us: what :meth:`quick_us` has returned, by its argument.
    """

    graph: Graph
    example: Concretizer
    tasks: GraphTasks
    given_bytes: int
    quick_times_us: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: Graph,
        own_parameters: Collection[int],
        sizes: Sizes | None,
        hardware: Hardware,
    ) -> _Unordered:
        # Open sizes cannot be compared: the order is found on a copy with the example's sizes, and
        # then applied to the nodes that the copy was made from.
        example = Concretizer(sizes)
        tasks = graph_tasks(example.graph(graph), own_parameters, hardware)
        given_bytes = peak_bytes(tasks.block, range(len(tasks.block.tasks)))
        return cls(graph, example, tasks, given_bytes)

    @cached_property
    def least_us(self) -> float:
        """A time below which there is no order."""
        return least_us(self.tasks.block)

    def quick_us(self, room_bytes: int) -> float:
        """Return about the time of :meth:`scheduled`."""
        if room_bytes not in self.quick_times_us:
            block = self.tasks.block
            order = list_schedule(block, room_bytes, quick=True)
            self.quick_times_us[room_bytes] = simulate(block, order).time_us
        return self.quick_times_us[room_bytes]

    def scheduled(self, room_bytes: int, least_beside: float = 0.0) -> _Schedule:
        """Return a good order; the arguments are those of :func:`overlapped`."""
        block, nodes = self.tasks.block, self.tasks.nodes
        if not block.wait_of or most_beside(block) < least_beside:
            given_us = simulate(block, range(len(block.tasks))).time_us
            return _Schedule(self.graph, (), (), block.compute_us, given_us, self.given_bytes)
        order = list_schedule(block, room_bytes)
        blocking = _blocking(block, order)
        # A start with its wait right after it is a blocking call, as the graph has it already.
        overlaps = len(blocking) < len(block.wait_of)
        steps = [
            Step(self.example.twin(nodes[position]), waits=task.waits_for is not None)
            for position in order
            if (task := block.tasks[position]).waits_for not in blocking
            and nodes[position].op == "call_function"
        ]
        return _Schedule(
            self.graph,
            steps if overlaps else (),
            [nodes[start] for start in sorted(blocking)],
            block.compute_us,
            simulate(block, order).time_us,
            peak_bytes(block, order),
        )


class _Ahead(NamedTuple):
    """A :class:`LookAhead` whose function of two calls is scheduled, in ``room_bytes``."""

    recompute: _Unordered
    rest: _Unordered
    both: _Schedule
    room_bytes: int

    def functions(self) -> LookAhead:
        """Return the graphs in good orders, and report them."""
        report_of(Pass.OVERLAP).rewrote(kind="look_ahead")
        others = (self.recompute, self.rest)
        recompute, rest = (each.scheduled(self.room_bytes).graph() for each in others)
        return LookAhead(recompute, rest, self.both.graph())


def _least_room_bytes(ways: Sequence[_Unordered], room: Room) -> int:
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


def _quickest(ways: Sequence[_Unordered], room_bytes: int) -> _Unordered:
    """Return the way that takes least time; of equal ones the first."""
    quickest = ways[0]
    for each in ways[1:]:
        # Most need no schedule: one before them takes the time of all kernels.
        if each.least_us * (1 + _ROUNDING) < quickest.quick_us(room_bytes):
            quickest = min(quickest, each, key=lambda way: way.quick_us(room_bytes))
    return quickest


def _look_ahead(
    ways: Sequence[tuple[_Unordered, LookAhead]],
    alone: _Schedule,
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
    recompute = _Unordered.of(cut.recompute, (), sizes, hardware)
    rest = _Unordered.of(cut.rest, own_parameters, sizes, hardware)
    ordered = both.scheduled(room_bytes)
    if ordered.time_us > worth_us or max(recompute.given_bytes, rest.given_bytes) > room_bytes:
        return None
    return _Ahead(recompute, rest, ordered, room_bytes)


def _hand_over(
    parts: Partitioned,
    best_so_far: _Schedule,
    own_parameters: Collection[int],
    room: Room,
    unordered: Callable[[Graph, Collection[int]], _Unordered],
) -> SplitBackward | None:
    """Return the backward that leaves a gradient to the call before, scheduled; ``None`` if that
    is not much better than ``best_so_far``."""
    worth_us = (1 - _WORTH_LOOKING_AHEAD) * best_so_far.time_us
    if worth_us < best_so_far.compute_us:
        return None
    most_bytes = max(room.backward_bytes, room.most_bytes)
    ways = {}
    for way in hand_overs(parts, own_parameters):
        both = unordered(way.both, own_parameters)
        if both.given_bytes <= most_bytes and both.least_us < worth_us:
            ways[both] = way
    if not ways:
        return None
    # The bound tells what a search may find, which the quick walk does not always.
    promising = min(ways, key=lambda both: (both.least_us, both.given_bytes))
    quickest = _quickest(list(ways), most_bytes)
    if quickest.quick_us(most_bytes) <= (1 + _WORTH_MORE) * promising.least_us:
        promising = quickest
    schedules = {both: both.scheduled(most_bytes) for both in dict.fromkeys((quickest, promising))}
    best = min(schedules, key=lambda both: schedules[both].time_us)
    split, ordered = ways[best], schedules[best]
    weights = unordered(split.weights, own_parameters)
    room_bytes = max(best.given_bytes, room.backward_bytes)
    if ordered.time_us <= worth_us and ordered.peak_bytes > room_bytes:
        room_bytes = max(room_bytes, _least_room_bytes([best], room))
        ordered = ordered if ordered.peak_bytes <= room_bytes else best.scheduled(room_bytes)
    if ordered.time_us > worth_us or weights.given_bytes > room_bytes:
        return None
    report_of(Pass.OVERLAP).rewrote(kind="hand_over")
    inputs = ordered.of_last_calls(split.inputs)
    return SplitBackward(inputs, weights.scheduled(room_bytes).graph(), ordered.graph())


def overlapped(
    graph: Graph,
    own_parameters: Collection[int] = (),
    sizes: Sizes | None = None,
    room_bytes: int = 0,
    hardware: Hardware = H100,
    least_beside: float = 0.0,
) -> Graph:
    """Return a copy of ``graph`` in another order, with waits; ``graph`` itself if nothing
    overlaps.

    Args:
        own_parameters: as for :func:`overlap_collectives`, like ``sizes`` and ``hardware``.
        room_bytes: allowed peak of ``graph``, if it is above its own.
        least_beside: minimum of kernel time that can overlap with some collective, relative to its
            time.
    """
    unordered = _Unordered.of(graph, own_parameters, sizes, hardware)
    return unordered.scheduled(room_bytes, least_beside).graph()


def _blocking(block: Block, order: Sequence[int]) -> set[int]:
    """Return starts that are waited for at once, with no other task in between."""
    place = {position: index for index, position in enumerate(order)}
    return {start for start, wait in block.wait_of.items() if place[wait] == place[start] + 1}


def _in_order(graph: Graph, steps: Sequence[Step]) -> Graph:
    """Copy ``graph`` in the order of ``steps``, which omit views and parts of results."""
    copy = Graph()
    copies = {node: copy.node_copy(node) for node in graph.find_nodes(op="placeholder")}
    for node, waits in steps:
        if not waits:
            _place(node, copy, copies)
            continue
        source = copies[node]
        # Later nodes find the wait in the collective's place: nothing else reads what is sent.
        copies[node] = make_like(
            copy, _wait, (source, source.args[3]),
            like=source, origin=Pass.OVERLAP, name=f"{source.name}_arrived",
        )  # fmt: skip
        report_of(Pass.OVERLAP).rewrote(kind="wait")
    for node in graph.output_node().all_input_nodes:
        if node not in copies:  # a view that only the output reads
            _place(node, copy, copies)
    copy.node_copy(graph.output_node(), copies.__getitem__)
    copy.lint()
    return copy


def _place(node: Node, copy: Graph, copies: dict[Node, Node]) -> None:
    """Append ``node`` to ``copy``, its views before it and its parts after it."""
    # Neither is a task: both cost nothing and hold no storage of their own.
    for source in node.all_input_nodes:
        if source not in copies:
            _place(source, copy, copies)
    copies[node] = copy.node_copy(node, copies.__getitem__)
    copies.update(
        (user, copy.node_copy(user, copies.__getitem__)) for user in node.users if is_part(user)
    )
