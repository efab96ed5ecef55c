"""Backwards that defer weight gradients to the call before, which has collectives to hide.

::

    backward:  full = convert(g)          inputs:   full = convert(g)
               grad_x = mm(full, w)   ->            grad_x = mm(full, w)
               grad_w = mm(t(full), x)              return grad_x, (full, x)
                                          weights:  grad_w = mm(t(full), x)
                                          both:     grad_w_behind = mm(t(full_behind), x_behind)
                                                    full = convert(g)
                                                    grad_x = mm(full, w)
                                                    return grad_x, grad_w_behind, (full, x)

"Before" and "behind" count calls in forward order, so that the backward of the call before runs
next. A backward begins with the gather of a gradient; the only work of the same call that can run
during it is recomputation. A weight gradient of the call behind can run there from the start: the
operators that compute it have no collectives. Collectives stay in the first function with their
operands, as do operators that read parameters. This is the B/W split of zero-bubble schedules, with
W deferred by one call.

Nodes keep their meta; placeholders of values that a function owns get ``meta["handed"]``.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from torch.fx import Node

from sp_compiler.ir.forward_backward import BEHIND, Partitioned, SplitBackward
from sp_compiler.ir.fx import ancestors
from sp_compiler.ir.op_traits import base, collective_of
from sp_compiler.ir.rewriting import subgraph
from sp_compiler.ir.symbolic import symbol_of, symbols_in
from sp_compiler.passes.overlap.look_ahead import handed_over, joined, with_parts
from sp_compiler.passes.overlap.tasks import Call


def movable_gradients(parts: Partitioned, own_parameters: Collection[int]) -> list[int]:
    """Return the inputs of a region whose gradients may be deferred to the call before; the one
    whose gradient is computed last comes first.

    Args:
        parts: without overlap, so that a collective and its wait are together.
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`. Other gradients
            stay: they are added to gradients of other calls, in the order of the calls.
    """
    assert parts.backward is not None
    grads: Sequence[Node | None] = parts.backward.output_node().args[0]
    place = {node: index for index, node in enumerate(parts.backward.nodes)}
    own = [(place[grad], index) for index in own_parameters if (grad := grads[index]) is not None]
    return [index for _, index in sorted(own, reverse=True)]


@dataclass(frozen=True, eq=False)
class HandOver:
    """A backward that defers gradients to the call before.

    Attributes:
        parts: has the backward, without overlap.
        late: inputs whose gradients are deferred.
        stays: operators of the backward that stay, in order.
        moved: operators that the call before runs: those of the late gradients, and views that both
            functions need.
        handed: the values that ``moved`` starts from.
        own: those of ``handed`` that only this call holds, which the call before may free.
        early: gradients that stay, one (or None) per input.
        behind: gradients that are deferred, in the same form.
    """

    parts: Partitioned
    late: frozenset[int]
    stays: Sequence[Node]
    moved: Sequence[Node]
    handed: Sequence[Node]
    own: Container[Node]
    early: Sequence[Node | None]
    behind: Sequence[Node | None]

    def calls(self) -> tuple[Call, Call]:
        """Return the deferred part of the call behind, and the call itself: what ``both`` runs."""
        own = [node for node in self.handed if node in self.own]
        returned = [*filter(None, self.early), *self.handed]
        return (
            Call(own, self.moved, [*filter(None, self.behind)]),
            Call((), self.stays, returned),
        )

    def split(self) -> SplitBackward:
        """Return the functions, with ``both``."""
        assert self.parts.backward is not None
        given = self.parts.backward.find_nodes(op="placeholder")
        weights = subgraph(self.handed, self.moved, self.behind)
        for node, placeholder in zip(
            self.handed, weights.find_nodes(op="placeholder"), strict=True
        ):
            placeholder.meta["handed"] = node in self.own
        inputs = subgraph(given, self.stays, [*self.early, *self.handed])
        num_tangents = len(given) - len(self.parts.saved)
        # The call behind first: its values may be freed before the call itself allocates any.
        graph, own, behind = joined(inputs, weights, num_tangents, BEHIND, other_first=True)
        of_call, of_behind = (each.output_node().args[0] for each in (inputs, weights))
        results = [None if node is None else own[node] for node in of_call]
        for index in self.late:
            results[index] = behind[of_behind[index]]
        graph.output(tuple(results))
        graph.lint()
        return SplitBackward(inputs, weights, graph)


def hand_over_of(parts: Partitioned, late: frozenset[int]) -> HandOver | None:
    """Defer the gradients of the inputs ``late`` to the call before; ``None`` if no operator of
    one of them would move, or if a moved operator would read a gradient that has been returned.

    Args:
        parts: as for :func:`movable_gradients`, whose result ``late`` is a subset of.
    """
    backward = parts.backward
    assert backward is not None
    grads: Sequence[Node | None] = backward.output_node().args[0]
    calls = [node for node in backward.nodes if node.op == "call_function"]
    early = [None if index in late else grad for index, grad in enumerate(grads)]
    behind = [grad if index in late else None for index, grad in enumerate(grads)]
    needed = ancestors(filter(None, behind))
    given = backward.find_nodes(op="placeholder")
    kinds = {node: each.kind for node, each in zip(given, parts.saved, strict=False)}

    def stays(node: Node) -> bool:
        # By the time the call before runs, a hook may have updated parameters.
        read = map(base, node.all_input_nodes)
        return collective_of(node) is not None or any(kinds.get(each) == "param" for each in read)

    first = with_parts(ancestors([*filter(None, early), *filter(stays, needed)]))
    second = {node: None for node in calls if node in needed and node not in first}
    met, twice = handed_over({*first, *given}, [*second, *filter(None, behind)])
    # Gradients are returned, and the caller may modify them in place.
    computed = {base(grad) for grad in filter(None, behind)} <= second.keys()
    if not computed or {*map(base, met)} & {*map(base, filter(None, early))}:
        return None
    # Open sizes are not operands: they occur in the shapes and arguments of the nodes.
    sizes = {symbol: node for node in given if (symbol := symbol_of(node)) is not None}
    symbols = symbols_in([*second, *twice, *met]) if sizes else set()
    met = {*met, *(node for symbol, node in sizes.items() if symbol in symbols)}
    return HandOver(
        parts,
        late,
        stays=[node for node in calls if node in first],
        moved=[node for node in calls if node in twice or node in second],
        handed=[node for node in backward.nodes if node in met],
        # Some of what the caller saved also belongs to others, such as results of other calls.
        own={node for node in met if kinds.get(node, "activation") == "activation"},
        early=early,
        behind=behind,
    )
