"""The calls of a graph as tasks of :mod:`sp_compiler.solve.block_schedule`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.memory import (
    arrival_bytes,
    made_storages,
    own_gradients,
    owned_bytes,
    run_bytes,
    scratch_bytes,
)
from sp_compiler.cost.node_cost import collectives_us, compute_us, node_collectives
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.op_traits import (
    base,
    collective_of,
    draws,
    is_handed,
    is_name,
    is_part,
    is_view,
)
from sp_compiler.solve.block_schedule import Block, Task


@dataclass(frozen=True)
class GraphTasks:
    """A graph as plain data.

    Attributes:
        block: its tasks in the order of the graph, with each collective awaited where it starts.
        nodes: node of each task; for a wait, the collective; for a first task that makes what the
            function is handed, one of these placeholders.
    """

    block: Block
    nodes: tuple[Node, ...]


def graph_tasks(graph: Graph, own_parameters: Collection[int], hardware: Hardware) -> GraphTasks:
    """Return the calls of ``graph``, whose sizes are numbers, as tasks.

    Views and parts of results are not tasks: they cost nothing and stay with their operators. An
    operator that writes into its operand and returns it is one.
    """
    builder = _Builder(graph, own_parameters, hardware)
    handed = [node for node in graph.find_nodes(op="placeholder") if is_handed(node)]
    builder.add_call(Call(handed, graph.nodes, graph.output_node().all_input_nodes))
    return GraphTasks(builder.block(), tuple(builder.nodes))


class Call(NamedTuple):
    """Nodes of a graph of which one of several calls consists.

    Attributes:
        handed: values that it is given as its own.
        nodes: those that it runs; what they read beside these and ``handed`` belongs to others.
        returned: values that outlive it.
    """

    handed: Sequence[Node]
    nodes: Iterable[Node]
    returned: Sequence[Node]


def block_of_calls(
    graph: Graph, calls: Sequence[Call], own_parameters: Collection[int], hardware: Hardware
) -> Block:
    """Return the block that :func:`graph_tasks` makes of a graph with ``calls`` one after another,
    of which the first alone has ``handed`` values, without the cost of such a graph.

    Args:
        graph: the one that has all nodes.
    """
    builder = _Builder(graph, own_parameters, hardware)
    for call in calls:
        builder.add_call(call)
    return builder.block()


class _Builder:
    """Tasks of the calls that were added, one after another.

    Attributes:
        tasks: of all of them.
        nodes: node of each task.
    """

    def __init__(self, graph: Graph, own_parameters: Collection[int], hardware: Hardware) -> None:
        self.tasks: list[Task] = []
        self.nodes: list[Node] = []
        # Gradients of the model's parameters are no activations, as in the peak that the plan has.
        self._ignored = {base(node) for node in own_gradients(graph, own_parameters)}
        self._hardware = hardware
        self._storage_bytes: list[int] = []
        self._returned: set[int] = set()
        self._handed: tuple[int, ...] = ()  # the first task, if it makes what is handed over
        self._last_draw: int | None = None
        self._last_write: int | None = None
        # Of the call that is being added: its counted storages, by the node that owns them, and the
        # task after which the result of a node can be read.
        self._storages: dict[Node, int] = {}
        self._result_of: dict[Node, int] = {}

    def add_call(self, call: Call) -> None:
        """Add the tasks of a call."""
        self._storages, self._result_of = {}, {}
        if call.handed:
            # One task makes what the function is handed, and all others need it.
            self._handed = (len(self.tasks),)
            self.tasks.append(Task(makes=tuple(map(self._new_storage, call.handed))))
            self.nodes.append(call.handed[0])
        for node in call.nodes:
            if node.op == "call_function" and not _stays_with_operator(node):
                self._add(node)
        self._returned.update(self._storages_of(call.returned))

    def block(self) -> Block:
        """Return the tasks as a block."""
        return Block(tuple(self.tasks), tuple(self._storage_bytes), frozenset(self._returned))

    def _new_storage(self, owner: Node) -> int:
        self._storages[owner] = len(self._storage_bytes)
        self._storage_bytes.append(owned_bytes(owner))
        return self._storages[owner]

    def _storages_of(self, nodes: Sequence[Node]) -> Iterator[int]:
        """Return the counted storages of ``nodes``."""
        for node in nodes:
            # Not the base at once: the call may be given an operand that another wrote into.
            while node not in self._storages and is_view(node):
                node = node.args[0]
            if node in self._storages:
                yield self._storages[node]

    def _add(self, node: Node) -> None:
        """Add the task of ``node``, and after a collective the wait for it."""
        position = len(self.tasks)
        before = _operators_before(node)
        needs = [self._result_of[source] for source in before if source in self._result_of]
        needs.extend(self._effects_before(node, position))
        needs.extend(self._handed)
        in_place = is_view(node)
        made = [] if in_place else made_storages(node)
        made = [storage for storage in made if storage not in self._ignored]
        makes = tuple(map(self._new_storage, made))
        reads = tuple(self._storages_of(node.all_input_nodes))
        link_us = 0.0
        collectives = node_collectives(node)
        if collectives:
            world_size = arguments(node)["world_size"]
            link_us = collectives_us(collectives, world_size, self._hardware)
        needed_bytes = scratch_bytes(node) if in_place else run_bytes(node, self._ignored)
        task = Task(
            needs=tuple(dict.fromkeys(needs)),
            time_us=compute_us(node, self._hardware),
            link_us=link_us,
            makes=makes,
            reads=reads,
            run_bytes=needed_bytes - arrival_bytes(node),
        )
        self.tasks.append(task)
        self.nodes.append(node)
        if collective_of(node) is not None:
            # The wait reads the operands too: they must live until the collective has ended.
            self.tasks.append(
                Task(
                    needs=(position,),
                    waits_for=position,
                    reads=reads,
                    run_bytes=arrival_bytes(node),
                )
            )
            self.nodes.append(node)
        self._result_of[node] = len(self.tasks) - 1

    def _effects_before(self, node: Node, position: int) -> Iterator[int]:
        """Return tasks that ``node`` may not overtake, although it does not read their results."""
        if self._last_write is not None:
            yield self._last_write
        if draws(node):
            # In the order of the graph, or another schedule would draw other numbers.
            if self._last_draw is not None:
                yield self._last_draw
            self._last_draw = position
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            # Any task before may read what it overwrites; later ones follow it, see above.
            yield from range(position)
            self._last_write = position


def _stays_with_operator(node: Node) -> bool:
    """Return whether ``node`` only names what an operator before it has made."""
    return is_part(node) or is_name(node)


def _operators_before(node: Node) -> Iterator[Node]:
    """Return operators whose results ``node`` reads, directly, as views or as parts."""
    for source in node.all_input_nodes:
        if _stays_with_operator(source):
            yield from _operators_before(source)
        elif source.op == "call_function":
            yield source
