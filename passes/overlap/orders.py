"""Graphs whose collectives overlap: a graph as tasks, a schedule of them, and the graph in that
order.

Nodes keep their meta; a ``wait`` gets that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.op_traits import is_part
from sp_compiler.ir.rewriting import copy_node, make_like
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.ops.convert import WAIT
from sp_compiler.passes.overlap.tasks import Call, GraphTasks, graph_tasks
from sp_compiler.solve.block_schedule import Block, most_beside, peak_bytes, simulate
from sp_compiler.solve.list_schedule import ListSchedule

_wait = WAIT.overload


class Step(NamedTuple):
    """One step of a schedule: ``node`` runs or, with ``waits``, its collective is waited for."""

    node: Node
    waits: bool


@dataclass(frozen=True)
class Schedule:
    """An order of the operators of ``given``; without ``steps``, its own.

    Attributes:
        blocking: collectives whose wait follows the start directly.
        compute_us: time of all kernels.
        time_us: time of the order.
        peak_bytes: peak of the order.
        room_bytes: peak that was allowed.
    """

    given: Graph
    steps: Sequence[Step]
    blocking: Sequence[Node]
    compute_us: float
    time_us: float
    peak_bytes: int
    room_bytes: int

    def graph(self) -> Graph:
        """Return a copy in this order, and report it; ``given`` itself if nothing overlaps."""
        for node in self.blocking:
            reason = "ranks wait for the collective: no work that fits in memory is left to hide it"
            report_of(Pass.OVERLAP).decline(node, reason)
        return _in_order(self.given, self.steps) if self.steps else self.given

    def of_last_calls(self, part: Graph) -> Graph:
        """Return ``part``, the last calls of ``given``, in their order here: ranks that run one and
        ranks that run the other then meet in the same collectives."""
        pairs = zip(reversed(self.given.nodes), reversed(part.nodes), strict=False)
        twins = {node: twin for node, twin in pairs if twin.op == "call_function"}
        steps = [Step(twins[node], waits) for node, waits in self.steps if node in twins]
        return replace(self, given=part, steps=steps, blocking=()).graph()


@dataclass(frozen=True, eq=False)
class Unordered:
    """A graph as tasks, for which any number of schedules can be made.

    Attributes:
        own_parameters: as for :func:`overlap_collectives`, like ``sizes``, ``hardware`` and
            ``fused``.
        example: maps nodes of the copy with the example's sizes to those of ``graph``.
        known_search: a search that has already found orders of the same tasks.
    """

    graph: Graph
    own_parameters: Collection[int]
    sizes: Sizes | None
    hardware: Hardware
    fused: bool
    example: Concretizer
    tasks: GraphTasks
    known_search: ListSchedule | None = None

    @classmethod
    def of(
        cls,
        graph: Graph,
        own_parameters: Collection[int],
        sizes: Sizes | None,
        hardware: Hardware,
        *,
        fused: bool = False,
    ) -> Unordered:
        # Open sizes cannot be compared: the order is found on a copy with the example's sizes, and
        # then applied to the nodes that the copy was made from.
        example = Concretizer(sizes)
        tasks = graph_tasks(example.graph(graph), own_parameters, hardware, fused=fused)
        return cls(graph, own_parameters, sizes, hardware, fused, example, tasks)

    def with_graph(self, graph: Graph) -> Unordered:
        """Return the same for another graph."""
        costs = self.sizes, self.hardware
        return Unordered.of(graph, self.own_parameters, *costs, fused=self.fused)

    @cached_property
    def search(self) -> ListSchedule:
        """The search for orders, one for all limits."""
        return self.known_search or ListSchedule(self.tasks.block)

    @property
    def given_bytes(self) -> int:
        """Peak of ``graph`` in its own order; no lower limit is guaranteed to be met."""
        return self.tasks.block.given_bytes

    def search_of_calls(self, calls: Sequence[Call]) -> ListSchedule:
        """Return the search for orders of a graph that has ``calls`` of nodes of ``graph``."""
        copies = self._copies
        of_example = [Call(*([copies[node] for node in nodes] for nodes in call)) for call in calls]
        return ListSchedule(self.tasks.block_of_calls(of_example))

    @cached_property
    def _copies(self) -> Mapping[Node, Node]:
        """Nodes of the copy with the example's sizes, by those of ``graph``."""
        copy = self.example.graph(self.graph)
        return {self.example.twin(node): node for node in copy.nodes}

    def scheduled(
        self, room_bytes: int, least_beside: float = 0.0, *, thorough: bool = False
    ) -> Schedule:
        """Return a good order; the arguments are those of :func:`overlapped`."""
        block, nodes = self.tasks.block, self.tasks.nodes
        if not block.wait_of or most_beside(block) < least_beside:
            given_us = simulate(block, range(len(block.tasks))).time_us
            times_us = block.compute_us, given_us
            return Schedule(self.graph, (), (), *times_us, self.given_bytes, room_bytes)
        order = self.search.order(room_bytes, thorough=thorough)
        blocking = _blocking(block, order)
        # A start directly followed by its wait is a blocking call, as in the graph already.
        overlaps = len(blocking) < len(block.wait_of)
        steps = [
            Step(self.example.twin(node), waits=task.waits_for is not None)
            for position in order
            if (task := block.tasks[position]).waits_for not in blocking
            and nodes[position].op == "call_function"
            for node in self.tasks.kernels[nodes[position]]
        ]
        return Schedule(
            self.graph,
            steps if overlaps else (),
            [nodes[start] for start in sorted(blocking)],
            block.compute_us,
            simulate(block, order).time_us,
            peak_bytes(block, order),
            room_bytes,
        )


def overlapped(
    graph: Graph,
    own_parameters: Collection[int] = (),
    sizes: Sizes | None = None,
    room_bytes: int = 0,
    hardware: Hardware = H100,
    least_beside: float = 0.0,
    *,
    fused: bool = False,
    thorough: bool = False,
) -> Graph:
    """Return a copy of ``graph`` in another order, with waits; ``graph`` itself if nothing
    overlaps.

    Args:
        own_parameters: as for :func:`overlap_collectives`, like ``sizes``, ``hardware`` and
            ``fused``.
        room_bytes: allowed peak of ``graph``, if it is above its own.
        least_beside: minimum kernel time that can overlap with some collective, relative to the
            collective's time.
        thorough: whether to search longer, for an order that will run.
    """
    unordered = Unordered.of(graph, own_parameters, sizes, hardware, fused=fused)
    return unordered.scheduled(room_bytes, least_beside, thorough=thorough).graph()


def _blocking(block: Block, order: Sequence[int]) -> set[int]:
    """Return starts directly followed by their wait."""
    place = {position: index for index, position in enumerate(order)}
    return {start for start, wait in block.wait_of.items() if place[wait] == place[start] + 1}


def _in_order(graph: Graph, steps: Sequence[Step]) -> Graph:
    """Copy ``graph`` in the order of ``steps``, which omit views and parts of results."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        copy_node(copy, node, copies)
    for node, waits in steps:
        if not waits:
            _place(node, copy, copies)
            continue
        source = copies[node]
        # Later nodes read the wait in place of the collective: nothing else reads what is sent.
        copies[node] = make_like(
            copy, _wait, (source, source.args[3]),
            like=source, origin=Pass.OVERLAP, name=f"{source.name}_arrived",
        )  # fmt: skip
        report_of(Pass.OVERLAP).rewrote(kind="wait")
    for node in graph.output_node().all_input_nodes:
        if node not in copies:  # a view that only the output reads
            _place(node, copy, copies)
    copy_node(copy, graph.output_node(), copies)
    copy.lint()
    return copy


def _place(node: Node, copy: Graph, copies: dict[Node, Node]) -> None:
    """Append ``node`` to ``copy``, its views before it and its parts after it."""
    # Neither is a task: both cost nothing and hold no storage of their own.
    for source in node.all_input_nodes:
        if source not in copies:
            _place(source, copy, copies)
    for each in (node, *filter(is_part, node.users)):
        copy_node(copy, each, copies)
