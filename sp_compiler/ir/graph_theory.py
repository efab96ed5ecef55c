"""FX graphs as networkx graphs: for users, and to find graphs that are equal up to node order.

networkx is imported lazily, since most compilations do not need it.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch.fx import Graph, Node
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    import networkx as nx


Item = TypeVar("Item", bound=Hashable)


def connected(pairs: Iterable[tuple[Item, Item]]) -> list[list[Item]]:
    """Return the connected components of ``pairs``, in order of first appearance."""
    from networkx.utils import UnionFind

    union = UnionFind()
    for pair in pairs:
        union.union(*pair)
    classes: dict[Item, list[Item]] = {}
    for item in union.parents:
        classes.setdefault(union[item], []).append(item)
    return list(classes.values())


def as_networkx(
    nodes: Iterable[Node],
    key: Callable[[Node], Hashable],
    attributes: Callable[[Node], Mapping[str, Any]],
) -> nx.MultiDiGraph:
    """Build the graph of ``nodes``: an edge from each operand to each use of it.

    Args:
        nodes: nodes of one FX graph, in order; operands that are not among them are left out.
        key: returns the key of a node in the result.
        attributes: returns the attributes of a node in the result.

    Returns:
        A graph whose edges have ``position``: the index among the user's operands, positional ones
        first, then keyword arguments by name; ``x * x`` has two edges.
    """
    import networkx as nx

    result = nx.MultiDiGraph()
    for node in nodes:
        result.add_node(key(node), **attributes(node))
        for position, operand in enumerate(_operands(node)):
            if key(operand) in result:
                result.add_edge(key(operand), key(node), position=position)
    return result


def _operands(node: Node) -> list[Node]:
    """Return the operands in an order that does not depend on that of the keyword arguments."""
    leaves = tree_iter((node.args, dict(sorted(node.kwargs.items()))))
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


class ComparableGraph:
    """A graph to compare with other graphs up to the order of nodes.

    Args:
        graph: its outputs are compared as a set; the isomorphism tells which output is which.
        label: returns everything about a node, except its operands, that must be equal. Nodes with
            equal labels must be interchangeable: where order matters, as for random draws, the
            label contains the position.
    """

    def __init__(self, graph: Graph, label: Callable[[Node], str]) -> None:
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        returned = set(graph.output_node().all_input_nodes)
        self.labels = {node: f"{label(node)} {node in returned}" for node in self.nodes}
        # Cheap to compute, equal for isomorphic graphs, and different for nearly all others.
        self.key = frozenset(Counter(self.labels.values()).items())

    def colors(self) -> dict[Node, Hashable]:
        """Return a hash of each node over its ancestors and descendants, equal under isomorphisms.

        One sweep down and one up distinguish nearly all nodes of a layer. The search then only has
        to try nodes of the same color.
        """
        down: dict[Node, Hashable] = {}
        for node in self.nodes:
            down[node] = hash((self.labels[node], *(down[source] for source in _operands(node))))
        uses: dict[Node, list[tuple[Hashable, int]]] = {node: [] for node in self.nodes}
        both: dict[Node, Hashable] = {}
        for node in reversed(self.nodes):
            # Sorted, since the uses of a value have no order.
            both[node] = hash((down[node], *sorted(uses[node])))
            for position, source in enumerate(_operands(node)):
                uses[source].append((both[node], position))
        return both


def isomorphism(first: ComparableGraph, second: ComparableGraph) -> dict[Node, Node] | None:
    """Return a map from the nodes of ``second`` to equal nodes of ``first``; ``None`` if there is
    none.

    The order of arguments matters: no operator is treated as commutative.
    """
    if first.key != second.key:
        return None
    colors = first.colors(), second.colors()
    if Counter(colors[0].values()) != Counter(colors[1].values()):
        return None
    import networkx as nx

    matcher = nx.isomorphism.MultiDiGraphMatcher(
        _for_matcher(second, colors[1]),
        _for_matcher(first, colors[0]),
        node_match=operator.eq,
        # Two nodes may be connected by several edges: ``x * x``. Their sets of positions must be
        # equal.
        edge_match=lambda edges, others: _positions(edges) == _positions(others),
    )
    # Any isomorphism will do: nodes that could be swapped compute the same.
    return next(matcher.isomorphisms_iter(), None)


def _for_matcher(graph: ComparableGraph, colors: Mapping[Node, Hashable]) -> nx.MultiDiGraph:
    # Colors guide the search, labels prove the result: equal hashes are not a proof.
    return as_networkx(
        graph.nodes,
        lambda node: node,
        lambda node: {"label": graph.labels[node], "color": colors[node]},
    )


def _positions(edges: Mapping[Any, Mapping[str, int]]) -> list[int]:
    """Return the operand positions of the edges between two nodes."""
    return sorted(itertools.chain.from_iterable(edge.values() for edge in edges.values()))
