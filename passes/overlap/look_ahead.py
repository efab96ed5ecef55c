"""Cuts of a backward, so that the call behind recomputes the first part while it waits for
collectives.

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
under them. Beside the rest of another call's backward, each has the other's kernels to hide under.

Nodes keep their meta; recomputed values among the placeholders get ``meta["handed"]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.ir.forward_backward import BEFORE, LookAhead
from sp_compiler.ir.fx import ancestors, is_getitem, reach
from sp_compiler.ir.op_traits import collective_of, is_view
from sp_compiler.ir.rewriting import copy_call, subgraph


def look_aheads(backward: Graph, num_saved: int) -> Iterator[LookAhead]:
    """Yield cuts behind each recomputed collective of ``backward``, the last one first.

    Kernels behind the last need no head start, and what they make would take memory.
    """
    recomputed = [node for node in backward.nodes if node.meta.get("recomputed")]
    collectives = [node for node in recomputed if collective_of(node) is not None]
    for count in range(len(collectives), 0, -1):
        yield _cut(backward, num_saved, collectives[:count])


def _cut(backward: Graph, num_saved: int, ends: Sequence[Node]) -> LookAhead:
    placeholders = backward.find_nodes(op="placeholder")
    saved, tangents = placeholders[:num_saved], placeholders[num_saved:]
    calls = [node for node in backward.nodes if node.op == "call_function"]
    first = ancestors(ends)
    # A tuple cannot be handed over: its parts belong to the function that has the operator.
    first |= {node for node in calls if is_getitem(node) and node.args[0] in first}
    grads: Sequence[Node | None] = backward.output_node().args[0]
    second = [node for node in calls if node not in first]
    reads = [each for node in second for each in node.all_input_nodes]
    reads += [grad for grad in grads if grad is not None]

    def again(node: Node) -> Sequence[Node]:
        """Operands of what is made on both sides: a view, for what is handed over is storage."""
        cheap = is_view(node) or not isinstance(node.meta["val"], Tensor)
        return node.all_input_nodes if node in first and cheap else ()

    met = reach(reads, again)
    twice = {node for node in met if again(node)}
    handed = [node for node in calls if node in met and node in first and node not in twice]
    rest = subgraph(
        [*saved, *handed, *tangents],
        [node for node in calls if node in twice or node not in first],
        grads,
    )
    for node in rest.find_nodes(op="placeholder")[num_saved : num_saved + len(handed)]:
        node.meta["handed"] = True
    recompute = subgraph(saved, [node for node in calls if node in first], handed)
    return LookAhead(recompute, rest, _joined(rest, recompute, len(tangents)))


def _joined(rest: Graph, recompute: Graph, num_tangents: int) -> Graph:
    """Return a graph with copies of ``rest`` and then of ``recompute``, which is of another
    call."""
    graph = Graph()
    own: dict[Node, Node] = {}
    before: dict[Node, Node] = {}

    def take(nodes: Sequence[Node], copies: dict[Node, Node], suffix: str) -> None:
        for node in nodes:
            copies[node] = graph.placeholder(f"{node.name}{suffix}")
            copies[node].meta = dict(node.meta)

    given = rest.find_nodes(op="placeholder")
    num_own = len(given) - num_tangents
    take(given[:num_own], own, "")
    take(recompute.find_nodes(op="placeholder"), before, BEFORE)
    take(given[num_own:], own, "")
    for source, copies, suffix in ((rest, own, ""), (recompute, before, BEFORE)):
        for node in source.nodes:
            if node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = copy_call(graph, node, args, kwargs, f"{node.name}{suffix}")
    grads = [None if node is None else own[node] for node in rest.output_node().args[0]]
    handed = [before[node] for node in recompute.output_node().args[0]]
    graph.output((*grads, *handed))
    graph.lint()
    return graph
