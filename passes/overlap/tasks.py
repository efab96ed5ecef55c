"""The calls of a graph as tasks of :mod:`sp_compiler.solve.block_schedule`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compiler.cost.fused_kernels import fused_bytes, kernels_of
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.memory import (
    arrival_bytes,
    in_flight_bytes,
    made_storages,
    own_gradients,
    owned_bytes,
    run_bytes,
    scratch_bytes,
    sent_copy_bytes,
    start_bytes,
)
from sp_compiler.cost.node_cost import collectives_us, compute_us, node_collectives
from sp_compiler.ir.fx import arguments, mutates
from sp_compiler.ir.op_traits import (
    base,
    collective_of,
    draws,
    is_handed,
    is_part,
    is_pure_view,
    is_view,
)
from sp_compiler.solve.block_schedule import Block, Task
from sp_compiler.solve.whole_kernels import whole_kernels


@dataclass(frozen=True)
class GraphTasks:
    """A graph as plain data.

    Attributes:
        block: its tasks in the order of the graph, with each collective awaited where it starts.
        nodes: node of each task, for a fused kernel the first; for a wait, the collective; for a
            first task that makes the values passed to the function, one of these placeholders.
        kernels: by the node of a task, all nodes that the task stands for.
    """

    block: Block
    nodes: tuple[Node, ...]
    kernels: Mapping[Node, Sequence[Node]]
    _facts: _FactsOfNodes

    def block_of_calls(self, calls: Sequence[Call]) -> Block:
        """Return the block of a graph with ``calls`` of nodes of this one, one after another, only
        the first of which has ``handed`` values, without the cost of making that graph."""
        builder = _Builder(self._facts)
        for call in calls:
            builder.add_call(call)
        return builder.found().block


def graph_tasks(
    graph: Graph,
    own_parameters: Collection[int],
    hardware: Hardware,
    *,
    fused: bool = False,
) -> GraphTasks:
    """Return the calls of ``graph``, whose sizes are fixed, as tasks.

    Views and parts of results are not tasks: they cost nothing and stay with their operators. An
    operator that writes into its operand and returns it is one.

    Args:
        fused: whether elementwise operators are fused in the order of ``graph``; consecutive nodes
            of one kernel are one task.
    """
    # Gradients of the model's parameters are not activations, as in the plan's peak.
    ignored = {base(node) for node in own_gradients(graph, own_parameters)}
    builder = _Builder(_FactsOfNodes(ignored, hardware, kernels_of(graph) if fused else {}, graph))
    handed = [node for node in graph.find_nodes(op="placeholder") if is_handed(node)]
    builder.add_call(Call(handed, graph.nodes, graph.output_node().all_input_nodes))
    return builder.found()


class Call(NamedTuple):
    """The nodes of one of several calls in a graph.

    Attributes:
        handed: values that it is given and owns.
        nodes: nodes that it runs; values other than these and ``handed`` that they read belong to
            others.
        returned: values that outlive it.
    """

    handed: Sequence[Node]
    nodes: Iterable[Node]
    returned: Sequence[Node]


class _Facts(NamedTuple):
    """Properties of the task of a node that are the same in every call.

    Attributes:
        before: operators whose results it reads.
        reads: for each operand, the nodes that may own its storage.
        made: nodes whose storages it makes and that count.
        sends_copy: whether it sends a copy, and does not hold its operand until it has arrived.
        in_flight_bytes: bytes that it holds until it has arrived.
        arrival_bytes: bytes that it allocates only when it has arrived.
        run_bytes: all bytes that it allocates before, ``in_flight_bytes`` included.
        kernel: number of the fused kernel that it is part of.
        is_awaited: whether it is a collective, followed by a task that waits for it.
        draws: whether it draws random numbers.
        writes: whether it writes into an operand.
    """

    before: Sequence[Node]
    reads: Sequence[Sequence[Node]]
    made: Sequence[Node]
    time_us: float
    link_us: float
    sends_copy: bool
    in_flight_bytes: int
    arrival_bytes: int
    run_bytes: int
    kernel: int | None
    is_awaited: bool
    draws: bool
    writes: bool


class _FactsOfNodes:
    """Facts of the nodes of a graph, each computed once, because many ways to divide the same nodes
    into calls are compared.

    Args:
        ignored: nodes whose storages do not count.
        kernels: numbers of the fused kernels, by the nodes that are in them.
        graph: the graph.
    """

    def __init__(
        self,
        ignored: Collection[Node],
        hardware: Hardware,
        kernels: Mapping[Node, int],
        graph: Graph,
    ) -> None:
        self._ignored, self._hardware, self._kernels = ignored, hardware, kernels
        self._traffic = fused_bytes(graph, kernels)
        self._known: dict[Node, _Facts | None] = {}

    def of(self, node: Node) -> _Facts | None:
        """Return the facts of a node; ``None`` if it is not a task."""
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def _found(self, node: Node) -> _Facts | None:
        if node.op != "call_function" or _stays_with_operator(node):
            return None
        in_place = is_view(node)
        made = [] if in_place else made_storages(node)
        collectives, link_us = node_collectives(node), 0.0
        if collectives:
            world_size = arguments(node)["world_size"]
            link_us = collectives_us(collectives, world_size, self._hardware)
        needed_bytes = scratch_bytes(node) if in_place else run_bytes(node, self._ignored)
        return _Facts(
            before=tuple(_operators_before(node)),
            reads=[_owners(source) for source in node.all_input_nodes],
            made=[storage for storage in made if storage not in self._ignored],
            time_us=compute_us(node, self._hardware, self._traffic),
            link_us=link_us,
            sends_copy=sent_copy_bytes(node) > 0,
            in_flight_bytes=in_flight_bytes(node),
            arrival_bytes=arrival_bytes(node),
            run_bytes=needed_bytes - scratch_bytes(node) + start_bytes(node),
            kernel=self._kernels.get(node),
            is_awaited=collective_of(node) is not None,
            draws=draws(node),
            writes=mutates(node),
        )


class _Builder:
    """Tasks of the calls that were added, one after another.

    Attributes:
        tasks: tasks of all calls.
        nodes: node of each task.
    """

    def __init__(self, facts: _FactsOfNodes) -> None:
        self.tasks: list[Task] = []
        self.nodes: list[Node] = []
        self._facts = facts
        # For each task the number of its call, and of its kernel within the call.
        self._kernels: list[tuple[int, int] | None] = []
        self._num_calls = 0
        self._storage_bytes: list[int] = []
        self._returned: set[int] = set()
        self._handed: tuple[int, ...] = ()  # the first task, if it makes the values passed in
        self._last_draw: int | None = None
        self._last_write: int | None = None
        # For the call that is being added: its counted storages, by the node that owns them, and
        # the task after which the result of a node can be read.
        self._storages: dict[Node, int] = {}
        self._result_of: dict[Node, int] = {}

    def add_call(self, call: Call) -> None:
        """Add the tasks of a call."""
        self._storages, self._result_of = {}, {}
        self._num_calls += 1
        if call.handed:
            # One task makes the values that the function is given, and all others need it.
            self._handed = (len(self.tasks),)
            makes = tuple(map(self._new_storage, call.handed))
            self._append(Task(makes=makes), call.handed[0])
        for node in call.nodes:
            facts = self._facts.of(node)
            if facts is not None:
                self._add(node, facts)
        self._returned.update(self._storages_of(map(_owners, call.returned)))

    def found(self) -> GraphTasks:
        """Return the tasks of all calls."""
        apart = Block(tuple(self.tasks), tuple(self._storage_bytes), frozenset(self._returned))
        block, runs = whole_kernels(apart, self._kernels)
        nodes = tuple(self.nodes[run.start] for run in runs)
        kernels = {self.nodes[run.start]: self.nodes[run.start : run.stop] for run in runs}
        return GraphTasks(block, nodes, kernels, self._facts)

    def _append(self, task: Task, node: Node, kernel: int | None = None) -> None:
        self.tasks.append(task)
        self.nodes.append(node)
        self._kernels.append(None if kernel is None else (self._num_calls, kernel))

    def _new_storage(self, owner: Node) -> int:
        self._storages[owner] = len(self._storage_bytes)
        self._storage_bytes.append(owned_bytes(owner))
        return self._storages[owner]

    def _storages_of(self, values: Iterable[Sequence[Node]]) -> Iterator[int]:
        """Return the counted storages of values, each given by the nodes that may own it."""
        for owners in values:
            for owner in owners:
                if owner in self._storages:
                    yield self._storages[owner]
                    break

    def _add(self, node: Node, facts: _Facts) -> None:
        """Add the task of ``node``, and after a collective the wait for it."""
        position = len(self.tasks)
        needs = [self._result_of[source] for source in facts.before if source in self._result_of]
        needs.extend(self._effects_before(facts, position))
        needs.extend(self._handed)
        makes = tuple(map(self._new_storage, facts.made))
        reads = tuple(self._storages_of(facts.reads))
        held = () if facts.sends_copy else reads
        if facts.in_flight_bytes:
            in_flight = len(self._storage_bytes)
            self._storage_bytes.append(facts.in_flight_bytes)
            makes, held = (*makes, in_flight), (*held, in_flight)
        task = Task(
            needs=tuple(dict.fromkeys(needs)),
            time_us=facts.time_us,
            link_us=facts.link_us,
            makes=makes,
            reads=reads,
            run_bytes=facts.run_bytes,
        )
        self._append(task, node, facts.kernel)
        if facts.is_awaited:
            # The wait reads what is sent and received too: it must live until the collective has
            # ended.
            wait = Task(
                needs=(position,),
                waits_for=position,
                reads=held,
                run_bytes=facts.arrival_bytes,
            )
            self._append(wait, node)
        self._result_of[node] = len(self.tasks) - 1

    def _effects_before(self, facts: _Facts, position: int) -> Iterator[int]:
        """Return tasks that the next may not overtake, although it does not read their results."""
        if self._last_write is not None:
            yield self._last_write
        if facts.draws:
            # In graph order, otherwise another schedule would draw other numbers.
            if self._last_draw is not None:
                yield self._last_draw
            self._last_draw = position
        if facts.writes:
            # Any earlier task may read what it overwrites; later ones follow it, see above.
            yield from range(position)
            self._last_write = position


def _stays_with_operator(node: Node) -> bool:
    """Return whether ``node`` only names a value that an operator before it has made."""
    return is_part(node) or is_pure_view(node)


def _operators_before(node: Node) -> Iterator[Node]:
    """Return operators whose results ``node`` reads, directly, as views or as parts."""
    for source in node.all_input_nodes:
        if _stays_with_operator(source):
            yield from _operators_before(source)
        elif source.op == "call_function":
            yield source


def _owners(node: Node) -> Sequence[Node]:
    """Return the nodes that may own the storage of ``node``: itself, and what it is a view of."""
    # Not only the base: an operand of a call may be the result of one that writes in place.
    owners = [node]
    while is_view(owners[-1]):
        owners.append(owners[-1].args[0])
    return owners
