"""Names of the values of a generated function, and their lifetimes.

A name is free again after the last statement that reads its value, as when a person writes ``x =
f(x)``: this avoids numbered names, and rebinding a name frees its old value. Other values are
deleted after their last use, because Python would keep them until the function returns.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch.fx import Graph, Node

from sp_compiler.codegen.expressions import first_alone
from sp_compiler.ir.op_traits import base, is_handed, is_started

UNUSED = "_"
"""Name of a result that nothing reads, in a statement with several results."""


class Lifetimes:
    """The names of one function.

    Args:
        graph: a forward or backward.
        parts: statements in order, with the nodes that each evaluates.
        nested: nodes without a name.
        candidates: returns candidate names for a node, best first.
        given: predetermined names of inputs, by node name.
        taken: names that are already used.

    Attributes:
        names: the name of each node that has one.
    """

    def __init__(
        self,
        graph: Graph,
        parts: Mapping[Node, Sequence[Node]],
        nested: Collection[Node],
        candidates: Callable[[Node], Sequence[str]],
        given: Mapping[str, str],
        taken: Iterable[str],
    ) -> None:
        self._parts = parts
        self._inputs = graph.find_nodes(op="placeholder")
        self._returned = set(graph.output_node().all_input_nodes)
        self._candidates = candidates
        self._last_read = {
            read: place
            for place, nodes in enumerate(parts.values())
            for node in nodes
            for read in node.all_input_nodes
            if read not in nested
        }
        self.names: dict[Node, str] = {}
        self._choose(given, set(taken))

    def _choose(self, given: Mapping[str, str], taken: set[str]) -> None:
        # An argument keeps its name to the end: a reader looks it up in the signature.
        for node in self._inputs:
            candidates = [given[node.name]] if node.name in given else self._candidates(node)
            self.names[node] = _first_free(candidates, taken)
            taken.add(self.names[node])
        # Names that become free, by the place of the statement that may rebind them.
        freed: dict[int, list[str]] = {}
        for place, statement in enumerate(self._parts):
            # A value that only this statement still reads may give up its name: x = f(x).
            taken.difference_update(freed.pop(place, ()))
            for node in targets(statement):
                name = self.names[node] = _first_free(self._candidates(node), taken)
                # One after another: names that one statement binds differ from each other.
                taken.add(name)
                if node not in self._returned:
                    last_read = self._last_read.get(node, place)
                    freed.setdefault(max(last_read, place + 1), []).append(name)

    def deaths(self) -> Mapping[Node, list[str]]:
        """Return for each statement the names to delete after it.

        Names that share a storage are deleted together. Values that the caller holds are not
        deleted, nor are handles of collectives, which hold nothing once these are complete.
        """
        # Deleting the name of a value that the caller holds would free nothing.
        given = [node for node in self._inputs if not is_handed(node)]
        kept = {base(node) for node in (*given, *self._returned)}
        last: dict[Node, Node] = {}
        for statement, nodes in self._parts.items():
            read = [node for part in nodes for node in part.all_input_nodes]
            # By storage: a view that is still read keeps all of it alive.
            for node in (*targets(statement), *nodes, *read):
                last[base(node)] = statement
        bound = {self.names[node]: node for node in self._inputs if is_handed(node)}
        deaths: dict[Node, list[str]] = {}
        for statement in self._parts:
            named = targets(statement)
            # A rebound name holds the new value; rebinding has freed the old one.
            bound.update((self.names[node], node) for node in named if not is_started(node))
            dead = [name for name, node in bound.items() if last[base(node)] is statement]
            freed = [name for name in dead if base(bound.pop(name)) not in kept]
            # Deleted too: a result that nothing reads would live as long as the others.
            if UNUSED in assigned(statement, self.names):
                freed.insert(0, UNUSED)
            if freed:
                deaths[statement] = freed
        return deaths


def targets(statement: Node) -> list[Node]:
    """Return the values that a statement assigns to names."""
    if not is_unpacked(statement):
        return [statement]
    return sorted(statement.users, key=lambda part: int(part.args[1]))


def assigned(statement: Node, names: Mapping[Node, str]) -> list[str]:
    """Return the names that a statement assigns, with ``UNUSED`` for results that nothing reads."""
    if not is_unpacked(statement):
        return [names[statement]]
    if first_alone(statement):
        return [names[part] for part in targets(statement)]
    parts = {int(part.args[1]): names[part] for part in statement.users}
    return [parts.get(index, UNUSED) for index in range(len(statement.meta["val"]))]


def _first_free(candidates: Sequence[str], taken: Collection[str]) -> str:
    """The first of ``candidates`` that is not ``taken``, else the first with a number."""
    stem = candidates[0].rstrip("_")  # "sum_" has a "_" because sum is a builtin
    numbered = (f"{stem}_{number}" for number in itertools.count(1))
    return next(name for name in itertools.chain(candidates, numbered) if name not in taken)


def is_unpacked(node: Node) -> bool:
    """Return whether it is a call with several results that are unpacked into names."""
    several = isinstance(node.meta.get("val"), list | tuple)
    return several and all(user.target is operator.getitem for user in node.users)


def is_named_part(node: Node) -> bool:
    """Return whether it is one of several results that are unpacked into names."""
    return node.target is operator.getitem and is_unpacked(node.args[0])
