"""The calls of a graph as tasks of :mod:`sp_compiler.solve.block_schedule`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
    builder.add_handed([node for node in graph.find_nodes(op="placeholder") if is_handed(node)])
    for node in graph.nodes:
        if node.op == "call_function" and not _stays_with_operator(node):
            builder.add(node)
    returned = map(base, graph.output_node().all_input_nodes)
    storages = builder.storages
    block = Block(
        tuple(builder.tasks),
        tuple(map(owned_bytes, storages)),
        frozenset(storages[storage] for storage in returned if storage in storages),
    )
    return GraphTasks(block, tuple(builder.nodes))


class _Builder:
    """Tasks of the nodes that were added, in graph order.

    Attributes:
        storages: counted storages, by the node that owns them.
    """

    def __init__(self, graph: Graph, own_parameters: Collection[int], hardware: Hardware) -> None:
        self.tasks: list[Task] = []
        self.nodes: list[Node] = []
        self.storages: dict[Node, int] = {}
        # Gradients of the model's parameters are no activations, as in the peak that the plan has.
        self._ignored = {base(node) for node in own_gradients(graph, own_parameters)}
        self._hardware = hardware
        self._result_of: dict[Node, int] = {}  # the task after which it can be read
        self._last_draw: int | None = None
        self._last_write: int | None = None

    def add_handed(self, nodes: Sequence[Node]) -> None:
        """Add a task that makes what the function is handed, and that all others need."""
        if not nodes:
            return
        self.storages.update((node, position) for position, node in enumerate(nodes))
        self.tasks.append(Task(makes=tuple(self.storages.values())))
        self.nodes.append(nodes[0])

    def add(self, node: Node) -> None:
        """Add the task of ``node``, and after a collective the wait for it."""
        position = len(self.tasks)
        needs = [self._result_of[source] for source in _operators_before(node)]
        needs.extend(self._effects_before(node, position))
        if self.nodes and self.nodes[0].op == "placeholder":
            needs.append(0)
        in_place = is_view(node)
        made = [] if in_place else made_storages(node)
        made = [storage for storage in made if storage not in self._ignored]
        for storage in made:
            self.storages[storage] = len(self.storages)
        read = [base(source) for source in node.all_input_nodes]
        reads = tuple(self.storages[storage] for storage in read if storage in self.storages)
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
            makes=tuple(self.storages[storage] for storage in made),
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
