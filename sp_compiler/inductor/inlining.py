"""Operators whose values depend on positions, such as dropout, in graphs for Inductor.

Each is first a node, which is then replaced by the graph of its kernel. A kernel has some 80
operators, and takes longer to trace than all the rest of a layer. So equal calls, of which forward
and backward of a layer have many, share one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import OPERATORS, Operator, operator_of

Tracer = Callable[..., GraphModule]
"""Traces a function of the rank and of tensors to a graph of ATen operators."""


def with_nodes(tp: Communicator) -> Communicator:
    """Make each placed operator that is called on ``tp`` a node of the trace; return ``tp``."""
    for operator in OPERATORS.values():
        if operator.placed:
            setattr(tp, operator.name, operator.overload)  # shadows the method, its kernel
    return tp


class Inlining:
    """Graphs of kernels, for calls with tensors of one fake tensor mode.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._bodies: dict[Hashable, Graph] = {}

    def run(self, graph: Graph, rank: Node, tracer: Tracer) -> None:
        """Replace every placed operator of ``graph`` by the operators of its kernel.

        Args:
            graph: as traced with :func:`with_nodes`, from tensors of fixed sizes.
            rank: its placeholder for the rank.
            tracer: traces a kernel.
        """
        for node in list(graph.nodes):
            operator = operator_of(node.target)
            if operator is None:
                continue
            key = _signature(node)
            if key not in self._bodies:
                self._bodies[key] = self._trace(operator, node, rank, tracer)
            body = self._bodies[key]
            inputs = body.find_nodes(op="placeholder")
            values = dict(zip(inputs, [rank, *node.all_input_nodes], strict=True))
            with graph.inserting_before(node):
                (result,) = graph.graph_copy(body, values)
            # Not the value of the shared trace: a later trace would take results of equal calls for
            # one tensor. A kernel's result is a new tensor, as this one is.
            result.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(result)
            graph.erase_node(node)

    def _trace(self, operator: Operator, node: Node, rank: Node, tracer: Tracer) -> Graph:
        inputs = node.all_input_nodes

        def kernel(rank: Tensor, *values: Tensor) -> list[Tensor]:
            known = dict(zip(inputs, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            tp = Communicator(None, rank, self._world_size)
            return [operator.kernel(tp, *args, **kwargs)]

        values = [source.meta["val"].detach() for source in (rank, *inputs)]
        return tracer(kernel, *values).graph


def _signature(node: Node) -> Hashable:
    """Equal for calls that compute the same from tensors of the same type and layout."""
    inputs = node.all_input_nodes
    arguments = map_arg((node.args, node.kwargs), lambda source: f"%{inputs.index(source)}")
    values = [source.meta["val"] for source in inputs]
    layouts = tuple((x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in values)
    return node.target, repr(arguments), layouts
