"""Match the nodes of one graph with those of another.

There are four steps, each for the nodes that earlier ones did not match:

1. placeholders and attributes by name, then by position; the output; operators by name if they
   were made from the same nodes;
2. nodes of the second graph that were made from a node of the first (``meta["source"]``), or that
   go back to the same node of the captured model (``meta["root"]``, else ``meta["source"]``), in
   order within such a group. If one node became several, they are its *expansion*, and one of them
   represents the value;
3. nodes with the same operator and matching operands, in topological order, so that a match spreads
   to its users;
4. a long common subsequence of operators, one match at a time, each followed by step 3.

Values are followed through inserted and removed nodes: if ``linear(x)`` became
``linear(convert(x))``, the operand still matches.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from sp_compiler.base.provenance import module_path
from sp_compiler.graph_diff.subsequences import longest_common
from sp_compiler.ir.fx import arguments, placements_of, tensor_operands
from sp_compiler.ir.text import render_target, render_value
from sp_compiler.trace.autograd_functions import may_be_same

_Key = Callable[[Node], str]
_NAMED = ("placeholder", "get_attr")
# Matching one pair at a time searches all unmatched nodes for each pair: at most this many rounds,
# and only up to this many pairs of unmatched nodes.
_MAX_ROUNDS, _MAX_ROUND_PAIRS = 20, 100_000
# Beyond this many, nodes that are still unmatched are reported as removed and inserted.
_MAX_PAIRS = 4_000_000
# Number of extra nodes through which a value is followed: a long chain may have any number.
_MAX_PASSED = 64


class Alignment:
    """Matching of ``before`` and ``after``.

    Attributes:
        forth: node of ``before`` to its node of ``after``.
        back: the inverse.
        expansions: node of ``before`` to the nodes of ``after`` that replaced it, if these are
            other operators; ``forth`` has the one with its value.
    """

    def __init__(self, before: Graph, after: Graph) -> None:
        self.before, self.after = list(before.nodes), list(after.nodes)
        self.forth: dict[Node, Node] = {}
        self.back: dict[Node, Node] = {}
        self.expansions: dict[Node, list[Node]] = {}
        self._owner: dict[Node, Node] = {}
        # Cached, as every candidate needs them and no graph changes.
        self._operands = cache(tensor_operands)
        # From certain matches to guesses: later steps do not revise earlier matches.
        self._match_named()
        computed = [node for node in (*self.before, *self.after) if node.op not in _NAMED]
        if any("root" in node.meta or "source" in node.meta for node in computed):
            self._match_same()
            self._match_groups(_name_and_root, _source_and_root)
            self._match_groups(_root, _root)
        self._spread()
        # For graphs that no pass of ours made: nodes captured in the same module.
        self._match_groups(_captured_in, _captured_in)
        self._spread()
        self._match_rest()
        # Last, because a replaced operator can only be identified by its neighbours.
        self._match_replacements()

    @property
    def removed(self) -> list[Node]:
        return [node for node in self.before if node not in self.forth]

    @property
    def inserted(self) -> list[Node]:
        return [node for node in self.after if self._is_inserted(node)]

    def same_value(self, old: Any, new: Any) -> bool:
        """Compare two arguments: literals by type and text, nodes by their matches."""
        if isinstance(old, Node) and isinstance(new, Node):
            # Both ways: one conversion may have been inserted and another one removed.
            ends = set(self._values_after(new))
            return any(self.forth.get(value) in ends for value in self._values_before(old))
        if isinstance(old, dict) and isinstance(new, dict):
            # In order, because a graph is called with the pytree of its arguments, which has one.
            return list(old) == list(new) and all(map(self.same_value, old.values(), new.values()))
        if isinstance(old, slice) and isinstance(new, slice):
            return self.same_value(_slice_parts(old), _slice_parts(new))
        if isinstance(old, list | tuple) and isinstance(new, list | tuple):
            return len(old) == len(new) and all(map(self.same_value, old, new))
        if isinstance(old, Node) or isinstance(new, Node):
            return False
        # By type as well: 1, 1.0 and True are equal in Python, but give results of other dtypes.
        return type(old) is type(new) and _text(old) == _text(new)

    def same_arguments(self, old: Node, new: Node) -> bool:
        """Return whether two matched nodes compute the same from the same values.

        For a replaced or expanded operator only the tensor operands are compared.
        """
        if old in self.expansions:
            expansion = set(self.expansions[old])
            parts = [part for node in self.expansions[old] for part in self._operands(node)]
            return self._same_set(self._operands(old), [p for p in parts if p not in expansion])
        # Arguments of two operators have different names and orders.
        if not _same_operator(old, new):
            return self.same_value(self._operands(old), self._operands(new))
        before, after = _named_arguments(old), _named_arguments(new)
        # The number that identifies an autograd function's call is not compared.
        is_function = old.target is torch.ops.sp_compiler_function.apply.default
        if is_function and not may_be_same(before.pop("call"), after.pop("call")):
            return False
        return self.same_value(before, after)

    def _same_set(self, old: Sequence[Node], new: Sequence[Node]) -> bool:
        covered = all(any(self.same_value(o, n) for o in old) for n in new)
        return covered and all(any(self.same_value(o, n) for n in new) for o in old)

    def _values_before(self, node: Node) -> Iterator[Node]:
        """``node`` and, as long as it is a removed node, the operand that it passes on."""
        yield node
        for _ in range(_MAX_PASSED):
            source = self._passed_on(node)
            if node in self.forth or source is None:
                return
            node = source
            yield node

    def _values_after(self, node: Node) -> Iterator[Node]:
        """``node`` and, as long as it is an inserted node, the operand that it passes on."""
        node = self._owner.get(node, node)
        yield node
        for _ in range(_MAX_PASSED):
            source = self._passed_on(node)
            if not self._is_inserted(node) or source is None:
                return
            node = self._owner.get(source, source)
            yield node

    def _passed_on(self, node: Node) -> Node | None:
        """Return the operand that an extra node passes on: its only one, or the one of the same
        origin."""
        operands = list(dict.fromkeys(self._operands(node)))
        if len(operands) > 1:
            operands = [operand for operand in operands if _root(operand) == _root(node)]
        return operands[0] if len(operands) == 1 else None

    def _is_inserted(self, node: Node) -> bool:
        return node not in self.back and node not in self._owner

    def _match(self, old: Node, new: Node) -> None:
        assert old not in self.forth
        assert self._is_inserted(new)
        self.forth[old], self.back[new] = new, old

    def _open_before(self) -> list[Node]:
        return [node for node in self.before if node not in self.forth and node.op not in _NAMED]

    def _open_after(self) -> list[Node]:
        return [node for node in self.after if self._is_inserted(node) and node.op not in _NAMED]

    def _match_named(self) -> None:
        for op in _NAMED:
            old = [node for node in self.before if node.op == op]
            new = [node for node in self.after if node.op == op]
            # A renamed parameter still goes back to the same captured one.
            for key in (_target, _root):
                by_key = {key(node): node for node in new if self._is_inserted(node)}
                for node in old:
                    if node not in self.forth and key(node) in by_key:
                        self._match(node, by_key.pop(key(node)))
            old = [node for node in old if node not in self.forth]
            new = [node for node in new if self._is_inserted(node)]
            # Two models whose inputs have different names may have the same number of inputs, in
            # the order of their forward.
            if len(old) == len(new):
                for pair in zip(old, new, strict=True):
                    self._match(*pair)
        outputs = ([n for n in nodes if n.op == "output"] for nodes in (self.before, self.after))
        for pair in zip(*outputs, strict=False):
            self._match(*pair)

    def _match_same(self) -> None:
        """Match operators of equal names that came from the same nodes: nothing changed."""
        old = {(node.name, _source_and_root(node)): node for node in self._open_before()}
        for new in self._open_after():
            counterpart = old.get((new.name, _source_and_root(new)))
            if counterpart is not None and _same_operator(counterpart, new):
                self._match(counterpart, new)

    def _match_groups(self, old_key: _Key, new_key: _Key) -> None:
        """Match nodes with equal keys, which come from the same captured node."""
        old_groups = _groups(self._open_before(), old_key)
        new_groups = _groups(self._open_after(), new_key)
        for group, old in old_groups.items():
            new = new_groups.get(group, [])
            # With literals first, to distinguish equal operators such as a reshape to 3 dims and
            # one to 4.
            for key in (_signature, render_target):
                self._match_sequence(old, new, key)
                old = [node for node in old if node not in self.forth]
                new = [node for node in new if self._is_inserted(node)]
            # Conversions come and go with placements: an operator does not expand into one.
            old = [node for node in old if placements_of(node) is None]
            new = [node for node in new if placements_of(node) is None]
            if len(old) == 1 and new:
                value = _value_node(new)
                self._match(old[0], value)
                self.expansions[old[0]] = new
                # Users of any part count as users of the value: an expansion is like one node.
                self._owner.update({node: value for node in new if node is not value})

    def _match_sequence(
        self,
        old: list[Node],
        new: list[Node],
        key: _Key,
        limit: int | None = None,
    ) -> None:
        pairs = longest_common([key(node) for node in old], [key(node) for node in new])
        for first, second in pairs[:limit]:
            self._match(old[first], new[second])

    def _spread(self) -> None:
        """Match nodes of the same operator whose operands match, from operands to users."""
        self._spread_to_namesakes()
        position = {node: index for index, node in enumerate(self.before)}
        for node in self._open_after():
            candidates = [
                old for old in self._users_of_same(node) if self._same_operands(old, node)
            ]
            if candidates:
                # The first of several, so that the same graphs always give the same pairs.
                exact = [old for old in candidates if self.same_arguments(old, node)]
                self._match(min(exact or candidates, key=position.__getitem__), node)

    def _spread_to_namesakes(self) -> None:
        """Match nodes of equal names that compute the same.

        Otherwise another node that computes the same could be matched instead, which would shift
        all following matches.
        """
        old = {node.name: node for node in self._open_before()}
        for node in self._open_after():
            namesake = old.get(node.name)
            is_same = namesake is not None and _same_operator(namesake, node)
            if is_same and self.same_arguments(namesake, node):
                self._match(namesake, node)

    def _users_of_same(self, new: Node) -> list[Node]:
        """Return unmatched nodes of ``new``'s operator that may have the same first operand."""
        operands = self._operands(new)
        if not operands:
            return [old for old in self._open_before() if _same_operator(old, new)]
        # Not by ``reach``, as it depends on the operand whether a user is passed through.
        values = [self.back[v] for v in self._values_after(operands[0]) if v in self.back]
        unmatched: dict[Node, None] = {}
        # The nearest first, because they are the most likely; the list grows.
        for value in values:
            if len(unmatched) > _MAX_PASSED:
                break
            for user in value.users:
                if user not in self.forth and user not in unmatched:
                    unmatched[user] = None
                    if self._passed_on(user) is value:
                        values.append(user)
        return [old for old in unmatched if _same_operator(old, new)]

    def _same_operands(self, old: Node, new: Node) -> bool:
        return self.same_value(self._operands(old), self._operands(new))

    def _match_rest(self) -> None:
        """Match along the longest common subsequence of operators, one pair at a time if
        possible."""
        # One pair at a time: after each match its users can match by their operands, which is more
        # reliable than the next pair of equal operators.
        for _ in range(_MAX_ROUNDS):
            old, new = self._open_before(), self._open_after()
            if len(old) * len(new) > _MAX_ROUND_PAIRS:
                break
            self._match_sequence(old, new, render_target, limit=1)
            self._spread()
        old, new = self._open_before(), self._open_after()
        if len(old) * len(new) <= _MAX_PAIRS:
            self._match_sequence(old, new, render_target)

    def _match_replacements(self) -> None:
        """Match remaining nodes with the same operands and users, or with the same operands if each
        is the only one in its module: the operator was replaced."""
        position = {node: index for index, node in enumerate(self.after)}
        for old in self._open_before():
            # Only an operand of its users' counterparts can have the same users.
            users = {self.forth[user] for user in old.users if user in self.forth}
            nearby = {node for user in users for node in user.all_input_nodes}
            for node in sorted(nearby, key=position.__getitem__):
                is_open = self._is_inserted(node) and node.op not in _NAMED
                has_users = users == {user for user in node.users if user in self.back}
                if is_open and has_users and self._same_shared_operands(old, node):
                    self._match(old, node)
                    break
        # If a norm and the activation after it were both replaced, neither has a matched user.
        new_groups = _groups(self._open_after(), module_path)
        for path, group in _groups(self._open_before(), module_path).items():
            both = [*group, *new_groups.get(path, [])]
            # Conversions, which come and go with placements, are not operators of the module.
            is_pair = path and len(group) == 1 and len(both) == 2
            if is_pair and not any(map(placements_of, both)) and self._same_shared_operands(*both):
                self._match(*both)

    def _same_shared_operands(self, old: Node, new: Node) -> bool:
        """Compare the operands, without parameters and inputs that only one side has."""
        # A LayerNorm has a bias that an RMSNorm lacks: it belongs to the new operator.
        before = [n for n in self._operands(old) if n.op not in _NAMED or n in self.forth]
        after = [n for n in self._operands(new) if n.op not in _NAMED or n in self.back]
        return self.same_value(before, after)


def _value_node(nodes: list[Node]) -> Node:
    """Return the node with the result among those that replaced an operator."""
    # Sharding marks the node with the value. Otherwise it is the node that others read; of several
    # results, the first one, because the others (a seed, statistics) are for backward.
    placed = [node for node in nodes if "placement" in node.meta]
    outside = [node for node in nodes if any(user not in nodes for user in node.users)]
    main = [n for n in outside if n.target is not operator.getitem or n.args[1] == 0]
    return (placed or main or outside or nodes)[-1]


def _groups(nodes: list[Node], key: _Key) -> dict[str, list[Node]]:
    groups: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        groups[key(node)].append(node)
    return groups


def _root(node: Node) -> str:
    """Return the name of the captured node that this one came from."""
    return str(node.meta.get("root") or node.meta.get("source") or node.name)


def _name_and_root(node: Node) -> str:
    return f"{node.name} {_root(node)}"


def _captured_in(node: Node) -> str:
    return module_path(node) or node.name


def _source_and_root(node: Node) -> str:
    return f"{node.meta.get('source')} {_root(node)}"


def _target(node: Node) -> str:
    return str(node.target)


def _same_operator(old: Node, new: Node) -> bool:
    return old.op == new.op and render_target(old) == render_target(new)


def _named_arguments(node: Node) -> Any:
    """Return arguments by name if there is a schema, so that the form of a call does not matter."""
    if isinstance(node.target, OpOverload):
        return arguments(node)
    return (node.args, dict(node.kwargs))


def _signature(node: Node) -> str:
    return f"{render_target(node)}{_text([a for a in node.args if not isinstance(a, Node)])}"


def _slice_parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _text(value: Any) -> str:
    return render_value(value, lambda node: "%")
