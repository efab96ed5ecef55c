"""Values without names, which are nested in the one expression that uses them.

A value may be nested if that changes neither the computation nor the memory that it needs:

- it is a view, pointwise, a copy or a constant, and has exactly one use;
- no collective is started or waited for, and nothing random is drawn, between the place where it
  was computed and its new place;
- its own operands, which are freed only after the entire expression, do not raise the peak of the
  function;
- the expression still fits into a line.

Operands of collectives have names, so that collectives stand out, and so that code that is cut at
communication computes them before the cut.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from sp_compiler.codegen.idioms import Idioms
from sp_compiler.codegen.lifetimes import is_named_part
from sp_compiler.cost.memory import call_scratch_bytes, in_flight_bytes, sent_operands
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.op_traits import (
    COPIES,
    FILLED,
    MATMULS,
    base,
    draws,
    is_collective,
    is_handed,
    is_part,
    is_pure_view,
    is_tagged_pointwise,
    is_view,
    is_wait,
)
from sp_compiler.ir.symbolic import example_number, example_numel
from sp_compiler.ops.registry import operator_of

aten = torch.ops.aten

Apart = Literal["", "collectives", "products"]
_CONSTANTS = frozenset({*FILLED, aten.arange.default, aten.arange.start})
_PURE_NAMESPACES = ("aten", "sp_compiler")


class Nesting:
    """Statements of a function, some nested in others.

    Args:
        graph: a forward or backward.
        idioms: groups of nodes that are printed as one call.
        gradients: whether the function returns gradients. Some of them may not count in the peak of
            a backward (:mod:`sp_compiler.cost.memory`); whichever these are, the peak must not
            increase.
        fits: whether the statement of a node is short enough with the current nesting.
        apart: statements that must not contain any other computation: those that communicate
            ("collectives"), or also matmuls ("products").

    Attributes:
        nested: nodes without a statement.
    """

    def __init__(
        self,
        graph: Graph,
        idioms: Idioms,
        gradients: bool,
        fits: Callable[[Node], bool],
        apart: Apart = "",
    ) -> None:
        self.nested: set[Node] = set()
        self._idioms = idioms
        self._fits = fits
        self._apart = apart
        self._nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._returned = set(graph.output_node().all_input_nodes)
        self.statements = [node for node in self._nodes if not is_named_part(node)]
        self._storages = _Storages(self._nodes, self._returned, gradients, self.nested)
        self._held = self._storages.held(self._trees(self.statements))
        self._limits = self._storages.limits(self.statements, self._held)
        peaks = itertools.accumulate((self._held[node].peak_bytes for node in self.statements), max)
        self._peak_before = dict(zip(self.statements, (0, *peaks), strict=False))

    def run(self) -> None:
        """Decide for every value, operands first.

        Constants are decided first, because most are printed as a number and need no memory; views
        last, because a named view only costs a line.
        """
        for match in list(self._idioms.matmuls.values()):
            if not self._nest(match.result, match.inside):
                self._idioms.forget(match.result)
        for is_turn in (_is_constant, self._is_computed, self._is_plain_view):
            for node in self._nodes:
                for operand in node.all_input_nodes:
                    # Greedy: finding the largest set of nestings would take a search, to save a
                    # line or two.
                    if is_turn(operand) and self._may_stand_in(operand, node):
                        self._nest(node, [operand])

    def tree(self, statement: Node) -> Iterator[Node]:
        """Return the nodes of a statement in Python's order of evaluation."""
        for operand in statement.all_input_nodes:
            if operand in self.nested:
                yield from self.tree(operand)
        yield statement

    def statement_of(self, node: Node) -> Node:
        """Return the statement that evaluates ``node``."""
        while node in self.nested:
            (node,) = node.users
        return node

    def _nest(self, user: Node, inside: Sequence[Node]) -> bool:
        self.nested.update(inside)
        # A number is shorter than its name.
        is_number = all(node.target is aten.scalar_tensor.default for node in inside)
        if (is_number or self._fits(user)) and self._move(self.statement_of(user), inside):
            return True
        self.nested.difference_update(inside)
        return False

    def _may_stand_in(self, node: Node, user: Node) -> bool:
        if node in self.nested or node in self._returned or node.op != "call_function":
            return False
        if tensor_operands(user).count(node) != 1 or len(node.users) != 1 or is_wait(node):
            return False
        if user.target is operator.getitem or not isinstance(node.meta.get("val"), Tensor):
            return False
        products_apart = self._apart == "products"
        if self._is_plain_view(node):
            computes = not all(map(is_view, self.tree(node)))
            if products_apart and computes and self._is_product(user):
                return False
            return node.target is not operator.getitem
        if self._apart and stays_apart(user):
            return False
        if products_apart and (self._is_product(user) or self._is_product(node)):
            return False
        into = is_nestable(user) or is_collective(user) or self._is_plain_view(user)
        return is_nestable(node) or (self._is_product(node) and into)

    def _is_product(self, node: Node) -> bool:
        return node.target in MATMULS or node in self._idioms.matmuls

    def _is_computed(self, node: Node) -> bool:
        return not self._is_plain_view(node)

    def _is_plain_view(self, node: Node) -> bool:
        # An in-place collective is a view only by its storage.
        is_plain = node not in self._idioms.matmuls and not is_collective(node)
        return is_view(node) and is_plain

    def _move(self, user: Node, inside: Sequence[Node]) -> bool:
        """Remove ``inside``, which is nested in the statement of ``user``, from the statements, if
        that is allowed."""
        # An in-place operator is a view only by its storage: it computes, and reads operands.
        computed = [node for node in inside if not all(map(is_pure_view, self.tree(node)))]
        if computed:
            start = min(self.statements.index(node) for node in computed)
            end = self.statements.index(user, start)
            changed = [node for node in self.statements[start : end + 1] if node not in inside]
            # Across a collective, the value would be computed while other ranks wait, or no longer
            # hide communication; across a draw of torch's generator, random numbers would change.
            if any(map(_keeps_its_place, changed[:-1])):
                return False
            # Nothing changes before and after these: looking at all statements for each value
            # would take minutes in a function of thousands.
            before = [self._held[node] for node in self.statements[start : end + 1]]
            freed = [storage for held in before for storage in held.freed]
            held = self._storages.held(self._trees(changed), before[0].before_bytes, freed)
            passed = self._limits_past(computed, end)
            limits = {node: passed.get(node, self._limits[node]) for node in held}
            if any(each.peak_bytes > limits[node] for node, each in held.items()):
                return False
            self._held.update(held)
            self._limits.update(limits)
        for node in inside:
            self.statements.remove(node)
        return True

    def _limits_past(self, moved: Sequence[Node], end: int) -> dict[Node, int]:
        """Return the limits of statements before position ``end`` past which gradients are moved:
        that those are made later must not make room, because they may not count."""
        limits: dict[Node, int] = {}
        for node in moved:
            late = [each for each in self.tree(node) if each in self._storages.gradients]
            late_bytes = sum(map(_kept_bytes, late))
            for each in self.statements[self.statements.index(node) + 1 : end] if late else ():
                # What was held before the gradient was made is no less without it.
                before = min(self._peak_before.get(gradient, 0) for gradient in late)
                limits[each] = max(before, limits.get(each, self._limits[each]) - late_bytes)
        return limits

    def _trees(self, statements: Sequence[Node]) -> list[list[Node]]:
        return [list(self.tree(node)) for node in statements]


def _is_constant(node: Node) -> bool:
    return node.target in _CONSTANTS


def is_nestable(node: Node) -> bool:
    """Return whether it is a pointwise operator, a copy or a constant."""
    if node.target is torch.ops.sp_compiler.dropout.default:  # its mask depends on no state
        return True
    if getattr(node.target, "namespace", "") != "aten" or draws(node):
        return False
    return is_tagged_pointwise(node) or node.target in COPIES or node.target in _CONSTANTS


def stays_apart(node: Node) -> bool:
    """Return whether a backend that compiles code between collectives leaves ``node`` out."""
    ours = operator_of(node.target)
    return is_collective(node) or (ours is not None and ours.runs_apart)


def _keeps_its_place(node: Node) -> bool:
    """Return whether no computation may be moved across ``node``."""
    if is_collective(node) or is_wait(node) or draws(node):
        return True
    return getattr(node.target, "namespace", "aten") not in _PURE_NAMESPACES


class _Held(NamedTuple):
    """What a function holds at a statement, without its arguments.

    Attributes:
        before_bytes: bytes when it begins.
        peak_bytes: peak while it runs.
        freed: storages that it frees.
    """

    before_bytes: int
    peak_bytes: int
    freed: Sequence[int]


class _Storages:
    """Storages of a function, without those of its arguments.

    Args:
        nested: nodes without a statement; it may change between calls.

    Attributes:
        gradients: those that the function returns, by the nodes that own their storages.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        returned: Iterable[Node],
        gradients: bool,
        nested: Container[Node],
    ) -> None:
        kept = {base(node) for node in returned}
        self.gradients = kept if gradients else set()
        self._nested = nested
        # All that does not change from one nesting to the next is looked up once: peaks are needed
        # for every value that might be nested.
        bases = {each: base(each) for node in nodes for each in (node, *node.all_input_nodes)}
        self._needs = {node: _needs(node) for node in nodes if bases[node] is node or is_wait(node)}
        holders: dict[Node, list[Node]] = {}
        users: dict[Node, list[Node]] = {}
        # Values handed over by another function are freed after their last use, like values that
        # are made here, and have names.
        operands = {owner for owner in bases.values() if owner.op == "placeholder"}
        handed = [owner for owner in operands if is_handed(owner) and owner not in kept]
        self._handed_bytes = sum(_bytes(owner.meta["val"]) for owner in handed)
        holders.update((owner, []) for owner in handed)
        for node in nodes:
            owner = bases[node]
            # Several results are freed one by one, each with the part that holds it.
            is_freed = owner.op != "placeholder" and owner not in kept
            if is_freed and isinstance(owner.meta["val"], Tensor):
                holders.setdefault(owner, []).append(node)
        for node in nodes:
            for used in {bases[used]: None for used in (node, *node.all_input_nodes)}:
                users.setdefault(used, []).append(node)
            # Until it has arrived, a collective holds what it sends, if that is no copy.
            for sent in sent_operands(node):
                users.setdefault(base(sent), []).append(node)
        # Bytes, whether it is handed over, the statements that hold it, and those that use it.
        self._freed = [
            (
                _bytes(owner.meta["val"]),
                owner in handed,
                [*map(_statement_of, of_owner)],
                [*map(_statement_of, users[owner])],
            )
            for owner, of_owner in holders.items()
        ]
        for node in filter(is_wait, nodes):
            start = node.all_input_nodes[0]
            if held_bytes := example_number(in_flight_bytes(start)):
                self._freed.append((held_bytes, False, [start], [start, node]))

    def limits(self, statements: Sequence[Node], held: Mapping[Node, _Held]) -> dict[Node, int]:
        """Return the bytes that each statement may hold without raising the peak of the function.

        Returned gradients stay until the end. Whichever of them do not count, a statement may hold
        as much as any statement before it, and as much as any later one holds without the gradients
        made in between.

        Args:
            held: what is held at each of ``statements`` while nothing is nested in them.
        """
        made = 0
        without: list[int] = []
        for node in statements:
            parts = (node, *filter(is_named_part, node.users))
            made += sum(_kept_bytes(part) for part in parts if part in self.gradients)
            without.append(held[node].peak_bytes - made)
        later = [*itertools.accumulate(reversed(without), max)][::-1]
        limits: dict[Node, int] = {}
        before = 0
        for index, node in enumerate(statements):
            before = max(before, held[node].peak_bytes)
            own = held[node].peak_bytes - without[index]
            limits[node] = max(before, own + later[index])
        return limits

    def held(
        self,
        trees: Sequence[Sequence[Node]],
        before_bytes: int | None = None,
        freed: Iterable[int] | None = None,
    ) -> dict[Node, _Held]:
        """Return what is held at each of some consecutive statements.

        Args:
            trees: their nodes, in order of evaluation.
            before_bytes: what is held when the first begins; by default, when the function begins.
            freed: storages whose last use is in these statements; by default all.
        """
        place = {
            node: (index, step)
            for index, nodes in enumerate(trees)
            for step, node in enumerate(nodes)
        }
        frees: dict[Node, int] = {}
        freed_in: list[list[int]] = [[] for _ in trees]
        for storage in range(len(self._freed)) if freed is None else freed:
            num_bytes, handed, holders, users = self._freed[storage]
            index, step = max(place[user] for user in users if user in place)
            named = handed or not all(holder in self._nested for holder in holders)
            last = trees[index][-1 if named else step]
            frees[last] = frees.get(last, 0) + num_bytes
            freed_in[index].append(storage)
        live = self._handed_bytes if before_bytes is None else before_bytes
        held = {}
        for index, nodes in enumerate(trees):
            before, peak = live, live
            for node in nodes:
                if node in self._needs:
                    during_bytes, after_bytes = self._needs[node]
                    peak = max(peak, live + during_bytes)
                    live += after_bytes
                live -= frees.get(node, 0)
            held[nodes[-1]] = _Held(before, peak, freed_in[index])
        return held


def _statement_of(node: Node) -> Node:
    return node.args[0] if is_named_part(node) else node


def _needs(node: Node) -> tuple[int, int]:
    """Return the bytes that a call allocates while it runs, and those of them that outlive it."""
    during_bytes, after_bytes = map(example_number, call_scratch_bytes(node))
    if is_wait(node):  # its result is that of the collective
        return during_bytes, after_bytes
    return _bytes(node.meta["val"]) + during_bytes, _kept_bytes(node) + after_bytes


def _kept_bytes(node: Node) -> int:
    """Return the bytes that outlive the call: of several results, only the named ones count."""
    if not isinstance(node.meta["val"], list | tuple):
        return _bytes(node.meta["val"])
    return sum(_bytes(part.meta["val"]) for part in node.users if is_part(part))


def _bytes(value: object) -> int:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(example_numel(leaf) * leaf.element_size() for leaf in leaves)
