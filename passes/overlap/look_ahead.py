"""Cuts of a backward for recompute prefetch: the call behind recomputes the first part while it
waits for collectives.

::

    backward:  x = mm(h, w)            recompute:  x = mm(h, w)
               y = convert(x)     ->               y = convert(x)
               grad = mm(g, y)                     return y
                                       rest:       grad = mm(g, y)
                                       both:       grad = mm(g, y)
                                                   x_before = mm(h_before, w_before)
                                                   y_before = convert(x_before)
                                                   return grad, y_before

Within a block, a recomputed forward is one chain through its own collectives, with little to run
during them. Together with the rest of another call's backward, each has the other's kernels to
overlap with.

Nodes keep their meta; recomputed values among the placeholders get ``meta["handed"]``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.ir.forward_backward import BEFORE, LookAhead
from sp_compiler.ir.fx import ancestors, is_getitem, reach
from sp_compiler.ir.op_traits import collective_of, is_pure_view
from sp_compiler.ir.rewriting import copy_node, subgraph


def look_aheads(backward: Graph, num_saved: int) -> Iterator[LookAhead]:
    """Yield cuts after each recomputed collective of ``backward``, the last one first.

    Kernels after the last one need no head start, and their results would take memory.
    """
    recomputed = [node for node in backward.nodes if node.meta.get("recomputed")]
    collectives = [node for node in recomputed if collective_of(node) is not None]
    for count in range(len(collectives), 0, -1):
        yield _cut(backward, num_saved, collectives[:count])


def _cut(backward: Graph, num_saved: int, ends: Sequence[Node]) -> LookAhead:
    placeholders = backward.find_nodes(op="placeholder")
    saved, tangents = placeholders[:num_saved], placeholders[num_saved:]
    calls = [node for node in backward.nodes if node.op == "call_function"]
    first = with_parts(ancestors(ends))
    grads: Sequence[Node | None] = backward.output_node().args[0]
    second = [node for node in calls if node not in first]
    met, twice = handed_over(first, [*second, *filter(None, grads)])
    handed = [node for node in calls if node in met]
    rest = subgraph(
        [*saved, *handed, *tangents],
        [node for node in calls if node in twice or node not in first],
        grads,
    )
    for node in rest.find_nodes(op="placeholder")[num_saved : num_saved + len(handed)]:
        node.meta["handed"] = True
    recompute = subgraph(saved, [node for node in calls if node in first], handed)
    graph, own, before = joined(rest, recompute, len(tangents), BEFORE)
    results = [None if node is None else own[node] for node in rest.output_node().args[0]]
    results += [before[node] for node in recompute.output_node().args[0]]
    graph.output(tuple(results))
    graph.lint()
    return LookAhead(recompute, rest, graph)


def with_parts(first: set[Node]) -> set[Node]:
    """Return ``first`` with all parts of its tuples."""
    # A tuple cannot be passed on: its parts belong to the function that has the operator.
    return first | {user for node in first for user in node.users if is_getitem(user)}


def handed_over(first: Container[Node], reads: Iterable[Node]) -> tuple[set[Node], set[Node]]:
    """Return the values that must be passed to a function that runs or returns the nodes ``reads``,
    and the views that it repeats, because only storages are passed.

    Args:
        first: nodes of the function before it.
    """

    def again(node: Node) -> Sequence[Node]:
        cheap = is_pure_view(node) or not isinstance(node.meta["val"], Tensor)
        return node.all_input_nodes if node in first and cheap else ()

    operands = [node for each in reads for node in (each, *each.all_input_nodes)]
    met = set(reach(operands, again))
    twice = {node for node in met if again(node)}
    return {node for node in met if node in first} - twice, twice


def joined(
    own: Graph, other: Graph, num_tangents: int, suffix: str, *, other_first: bool = False
) -> tuple[Graph, dict[Node, Node], dict[Node, Node]]:
    """Return a graph without an output that has the calls of ``own`` and of ``other``, which is
    part of another call; and the copies of the nodes of each.

    Args:
        own: its last placeholders are tangents, and stay the last.
        suffix: for names of nodes of ``other``.
        other_first: whether its calls come first.
    """
    graph = Graph()
    copies: tuple[dict[Node, Node], dict[Node, Node]] = {}, {}
    suffixes = ("", suffix)

    def take(nodes: Sequence[Node], of_other: bool) -> None:
        for node in nodes:
            copies[of_other][node] = graph.placeholder(f"{node.name}{suffixes[of_other]}")
            copies[of_other][node].meta = dict(node.meta)

    given = own.find_nodes(op="placeholder")
    num_own = len(given) - num_tangents
    take(given[:num_own], False)
    take(other.find_nodes(op="placeholder"), True)
    take(given[num_own:], False)
    for of_other in (other_first, not other_first):
        made = copies[of_other]
        for node in (own, other)[of_other].nodes:
            if node.op == "call_function":
                copy_node(graph, node, made, f"{node.name}{suffixes[of_other]}")
    return graph, *copies
