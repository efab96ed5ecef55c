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
hidden (:mod:`sp_compiler.solve.list_schedule`). Memory comes first: no order may raise the peak of
the step. Of calls in a row, each may recompute for the one before it what would expose
communication there (:mod:`.look_ahead`).

Nodes keep their meta; a ``wait`` gets that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.cost.step_walk import Phase
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import LookAhead, Partitioned, SplitBackward
from sp_compiler.ir.op_traits import is_part
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.ops.convert import WAIT
from sp_compiler.passes.overlap.look_ahead import look_aheads
from sp_compiler.passes.overlap.tasks import graph_tasks
from sp_compiler.solve.block_schedule import Block, most_beside, peak_bytes, simulate
from sp_compiler.solve.list_schedule import list_schedule

_wait = WAIT.overload


# A forward whose collectives have less beside them, in relation to their time, stays as it is: it
# gains next to nothing and reads as the model does.
_WORTH_STARTING = 0.1
# Part of a backward's time. Below it three more functions to compile and to read gain too little.
_WORTH_LOOKING_AHEAD = 0.01


def overlap_collectives(
    parts: Partitioned,
    own_parameters: Collection[int],
    sizes: Sizes | None = None,
    room_bytes: Mapping[Phase, int] | None = None,
    hardware: Hardware = H100,
    *,
    in_a_row: bool = False,
) -> Partitioned:
    """Return a copy of ``parts`` whose forward and backwards overlap work with collectives.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        sizes: the open sizes; memory and time are computed for the example's.
        room_bytes: allowed peak of forward and backward, if it is above their own.
        hardware: profile for estimated times.
        in_a_row: whether calls of the region follow each other, so that a backward may recompute
            for the call before.
    """
    room_bytes = room_bytes or {}
    forward = overlapped(
        parts.forward, (), sizes, room_bytes.get("forward", 0), hardware, _WORTH_STARTING
    )
    parts = replace(parts, forward=forward)
    if parts.backward is None:
        return parts
    wanted = own_parameters, sizes, room_bytes.get("backward", 0), hardware
    backward = _scheduled(parts.backward, *wanted)
    loss, split = parts.loss, parts.split
    ahead = None
    if in_a_row and loss is None:
        ahead = _look_ahead(parts.backward, len(parts.saved), backward, wanted)
    if loss is not None:
        loss = replace(loss, backward=overlapped(loss.backward, *wanted))
    if split is not None:
        # This half returns no gradients of parameters, so none are exempt from the peak.
        inputs = overlapped(split.inputs, (), *wanted[1:])
        split = SplitBackward(inputs, overlapped(split.weights, *wanted))
    backward_graph = backward.graph()
    return replace(parts, backward=backward_graph, loss=loss, split=split, ahead=ahead)


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
        given_bytes: peak of ``given`` in its own order, below which no limit can be met.
    """

    given: Graph
    steps: Sequence[Step] = ()
    blocking: Sequence[Node] = ()
    compute_us: float = 0.0
    time_us: float = 0.0
    given_bytes: int = 0

    def graph(self) -> Graph:
        """Return a copy in this order, and report it; ``given`` itself if nothing overlaps."""
        for node in self.blocking:
            report_of(Pass.OVERLAP).decline(node, "nothing runs meanwhile in its memory")
        return _in_order(self.given, self.steps) if self.steps else self.given


def _look_ahead(
    backward: Graph,
    num_saved: int,
    alone: _Schedule,
    wanted: tuple[Collection[int], Sizes | None, int, Hardware],
) -> LookAhead | None:
    """Return the cut of ``backward`` that hides most, scheduled; ``None`` if none is much better
    than ``alone``."""
    _, _, room_bytes, _ = wanted
    worth_us = (1 - _WORTH_LOOKING_AHEAD) * alone.time_us
    if worth_us < alone.compute_us:
        return None
    cuts = [
        (_scheduled(cut.both, *wanted, quick=True), cut) for cut in look_aheads(backward, num_saved)
    ]
    # Memory comes first, also that of what is handed over.
    cuts = [(both, cut) for both, cut in cuts if both.given_bytes <= room_bytes]
    if not cuts:
        return None
    _, cut = min(cuts, key=lambda each: each[0].time_us)
    # The first returns no gradients: recomputed values stand in their place.
    recompute = _scheduled(cut.recompute, (), *wanted[1:])
    rest, both = _scheduled(cut.rest, *wanted), _scheduled(cut.both, *wanted)
    if both.time_us > worth_us or max(recompute.given_bytes, rest.given_bytes) > room_bytes:
        return None
    report_of(Pass.OVERLAP).rewrote(kind="look_ahead")
    return LookAhead(recompute.graph(), rest.graph(), both.graph())


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
    return _scheduled(graph, own_parameters, sizes, room_bytes, hardware, least_beside).graph()


def _scheduled(
    graph: Graph,
    own_parameters: Collection[int],
    sizes: Sizes | None,
    room_bytes: int,
    hardware: Hardware,
    least_beside: float = 0.0,
    *,
    quick: bool = False,
) -> _Schedule:
    """Return the order of :func:`overlapped`; ``quick`` is that of :func:`list_schedule`."""
    # Open sizes cannot be compared: the order is found on a copy with the example's sizes, and then
    # applied to the nodes that the copy was made from.
    example = Concretizer(sizes)
    tasks = graph_tasks(example.graph(graph), own_parameters, hardware)
    block = tasks.block
    given = range(len(block.tasks))
    if not block.wait_of or most_beside(block) < least_beside:
        times_us = block.compute_us, simulate(block, given).time_us
        return _Schedule(graph, (), (), *times_us, peak_bytes(block, given))
    order = list_schedule(block, room_bytes, quick=quick)
    blocking = _blocking(block, order)
    # A start with its wait right after it is a blocking call, as the graph has it already.
    overlaps = len(blocking) < len(block.wait_of)
    steps = [
        Step(example.twin(tasks.nodes[position]), waits=task.waits_for is not None)
        for position in order
        if (task := block.tasks[position]).waits_for not in blocking
        and tasks.nodes[position].op == "call_function"
    ]
    return _Schedule(
        graph,
        steps if overlaps else (),
        [tasks.nodes[start] for start in sorted(blocking)],
        block.compute_us,
        simulate(block, order).time_us,
        peak_bytes(block, given),
    )


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
