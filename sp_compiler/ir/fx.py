"""Helpers that read FX graphs, shared by all passes; they do not change graphs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from sp_compiler.base.placement import Placement
from sp_compiler.ops.convert import CONVERT, CONVERT_IN_PLACE


def module_of(
    graph: Graph, root: nn.Module | None = None, name: str = "GraphModule"
) -> GraphModule:
    """Return a module of ``graph`` and of the tensors of ``root`` that it names.

    Its Python code is generated lazily, since most graphs are never run or printed.
    """
    return _LazyGraphModule(root or nn.Module(), graph, class_name=name)


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by schema name, including defaults."""
    return named_arguments(node.target, node.args, node.kwargs)


def named_arguments(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return :func:`arguments` of a call of ``operation`` with ``args`` and ``kwargs``."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(operation._schema.arguments):
        if position < len(args):
            values[argument.name] = args[position]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def mutates(node: Node) -> bool:
    """Return whether ``node`` writes in place, by the schema of its operator."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def written_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes into, by its schema: ``x`` for ``x.add_(y)``; all
    items of a list."""
    values = named_arguments(operation, args, kwargs)
    return [
        leaf
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(values.get(argument.name))
    ]


def written_operands(node: Node) -> list[Node]:
    """Return the operands that ``node`` writes into."""
    if not mutates(node):
        return []
    written = written_arguments(node.target, node.args, node.kwargs)
    return [operand for operand in written if isinstance(operand, Node)]


def carries_gradient(value: Tensor) -> bool:
    """Return whether a tensor of this dtype may require a gradient."""
    return value.is_floating_point() or value.is_complex()


def tensor_operands(node: Node) -> list[Node]:
    """Return the nodes among the arguments in order, with repeats (``x * x`` has two)."""
    operands: list[Node] = []
    # FX's own walk, in C++, takes a tenth of pytree's time.
    map_arg((node.args, node.kwargs), operands.append)
    return operands


def is_call(node: object, *targets: Any) -> bool:
    """Return whether ``node`` is a call of one of ``targets`` (operator overloads, by identity)."""
    # A target may be any callable, possibly with its own ``==``.
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and any(node.target is target for target in targets)
    )


def is_getitem(node: object) -> bool:
    """Return whether ``node`` picks one result of an operator with several."""
    return is_call(node, operator.getitem)


def calls(graph: Graph, *targets: Any) -> Iterator[Node]:
    """Yield calls of ``targets`` in graph order; the graph may be edited meanwhile."""
    # Iterates over a copy, so nodes that are inserted meanwhile are not visited.
    for node in list(graph.nodes):
        if is_call(node, *targets):
            yield node


def base_name(node: Node) -> str:
    """Return the node's name without the numbers that made it unique."""
    # There may be several: a copy of a numbered name may have been numbered again, ``mul_1_2``.
    return re.sub(r"(_\d+)+$", "", node.name) or node.name


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of the tensor that ``node`` returns."""
    return tuple(node.meta["val"].shape)


def reduced_dims(node: Node) -> list[int]:
    """Return the dims over which a sum or mean runs: all of them if it names none."""
    bound = arguments(node)
    rank = len(shape_of(bound["self"]))
    return [dim % rank for dim in bound.get("dim") or range(rank)]


def reach(
    nodes: Iterable[Node],
    following: Callable[[Node], Iterable[Node]],
    stop: Container[Node] = (),
) -> dict[Node, None]:
    """Return ``nodes`` and all nodes reachable from them, nearest first, as an ordered set.

    This is the only graph walk that does not follow graph order. It is breadth-first, so that a
    caller who looks for one node finds the nearest. The result is a dict, because decisions must
    not depend on the order of a set.

    Args:
        nodes: nodes at which the walk starts.
        following: the neighbours of a node, such as its operands or its users.
        stop: nodes that are included, but not followed further.
    """
    # networkx would need a copy of the graph for each walk; these run thousands of times.
    met = dict.fromkeys(nodes)
    queue = list(met)
    for node in queue:  # the queue grows
        if node in stop:
            continue
        for other in following(node):
            if other not in met:
                met[other] = None
                queue.append(other)
    return met


def operands(node: Node) -> list[Node]:
    """Return the operands of ``node``, each once; for :func:`reach`."""
    return node.all_input_nodes


def users(node: Node) -> Iterable[Node]:
    """Return the users of ``node``, each once; for :func:`reach`."""
    return node.users


def ancestors(nodes: Iterable[Node], stop: Container[Node] = ()) -> set[Node]:
    """Return ``nodes`` and all values they are computed from, up to and including ``stop``."""
    return set(reach(nodes, operands, stop))


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """Return ``nodes`` and all nodes computed from them, including the output node."""
    return set(reach(nodes, users))


def placements_of(node: Node) -> tuple[Placement, Placement] | None:
    """Return (source, destination) of a placement conversion, ``None`` for any other node."""
    if node.target not in (CONVERT.overload, CONVERT_IN_PLACE.overload):
        return None
    # Placements are text in the graph, since schemas have no type for them.
    return Placement.parse(node.args[1]), Placement.parse(node.args[2])
