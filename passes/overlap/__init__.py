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
the step.

Nodes keep their meta; a ``wait`` gets that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.cost.step_walk import Phase
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import Partitioned, SplitBackward
from sp_compiler.ir.op_traits import collective_of, is_part
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.ops.convert import WAIT
from sp_compiler.passes.overlap.tasks import graph_tasks
from sp_compiler.solve.block_schedule import Block, most_beside
from sp_compiler.solve.list_schedule import list_schedule

_wait = WAIT.overload


# A forward whose collectives have less beside them, in relation to their time, stays as it is: it
# gains next to nothing and reads as the model does.
_WORTH_STARTING = 0.1


def overlap_collectives(
    parts: Partitioned,
    own_parameters: Collection[int],
    sizes: Sizes | None = None,
    room_bytes: Mapping[Phase, int] | None = None,
    hardware: Hardware = H100,
) -> Partitioned:
    """Return a copy of ``parts`` whose forward and backwards overlap work with collectives.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        sizes: the open sizes; memory and time are computed for the example's.
        room_bytes: allowed peak of forward and backward, if it is above their own.
        hardware: profile for estimated times.
    """
    room_bytes = room_bytes or {}
    forward = overlapped(
        parts.forward, (), sizes, room_bytes.get("forward", 0), hardware, _WORTH_STARTING
    )
    parts = replace(parts, forward=forward)
    if parts.backward is None:
        return parts
    wanted = own_parameters, sizes, room_bytes.get("backward", 0), hardware
    backward = overlapped(parts.backward, *wanted)
    loss, split = parts.loss, parts.split
    if loss is not None:
        loss = replace(loss, backward=overlapped(loss.backward, *wanted))
    if split is not None:
        # This half returns no gradients of parameters, so none are exempt from the peak.
        inputs = overlapped(split.inputs, (), *wanted[1:])
        split = SplitBackward(inputs, overlapped(split.weights, *wanted))
    return replace(parts, backward=backward, loss=loss, split=split)


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
    # Open sizes cannot be compared: the order is found on a copy with the example's sizes, and then
    # applied to the nodes that the copy was made from.
    example = Concretizer(sizes)
    concrete = example.graph(graph)
    if not any(collective_of(node) is not None for node in concrete.nodes):
        return graph
    tasks = graph_tasks(concrete, own_parameters, hardware)
    block = tasks.block
    if most_beside(block) < least_beside:
        return graph
    order = list_schedule(block, room_bytes)
    blocking = _blocking(block, order)
    for start in sorted(blocking):
        report_of(Pass.OVERLAP).decline(tasks.nodes[start], "nothing runs meanwhile in its memory")
    # A start with its wait right after it is a blocking call, as the graph has it already.
    if len(blocking) == len(block.wait_of):
        return graph
    steps = [
        Step(example.twin(tasks.nodes[position]), waits=task.waits_for is not None)
        for position in order
        if (task := block.tasks[position]).waits_for not in blocking
    ]
    return _in_order(graph, steps)


def _blocking(block: Block, order: Sequence[int]) -> set[int]:
    """Return starts that are waited for at once, with no other task in between."""
    place = {position: index for index, position in enumerate(order)}
    return {start for start, wait in block.wait_of.items() if place[wait] == place[start] + 1}


class Step(NamedTuple):
    """One step of a schedule: ``node`` runs or, with ``waits``, its collective is awaited."""

    node: Node
    waits: bool


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
