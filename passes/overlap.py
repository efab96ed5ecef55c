"""Overlap of collectives in backward with work that does not depend on them.

Work on which no collective of the same graph depends, such as the gradients of weights, is deferred
until the next collective has been started; the first user of a collective's result waits for it::

    grad_w = mm(t(g), x)             grad_x = mm(g, w)
    grad_x = mm(g, w)          ->    started = convert(grad_x, P, S(0))
    grad_x = convert(...)            grad_w = mm(t(g), x)
    ... grad_x ...                   arrived = wait(started)
                                     ... arrived ...

This is the order of Megatron-LM's linear layers (Korthikanti et al. 2022, section 4.2.2). Where
backward gathers its gradient before it recomputes the forward, the recomputation runs meanwhile.
Memory comes first: nothing is deferred where that would raise the peak of the backward.

Nodes keep their meta; a ``wait`` has that of its collective, with ``meta["origin"] = "overlap"``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.cost.memory import backward_peak_bytes, peak_in_order
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import Partitioned, SplitBackward
from sp_compiler.ir.fx import ancestors
from sp_compiler.ir.op_traits import base, collective_of, is_collective, is_part, is_view
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.ops.convert import WAIT

_wait = WAIT.overload


def overlap_backward(
    parts: Partitioned, own_parameters: Collection[int], sizes: Sizes | None = None
) -> Partitioned:
    """Copy ``parts`` with backwards in which work runs under collectives.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        sizes: the open ones; memory is that of the example's sizes.
    """
    if parts.backward is None:
        return parts
    backward = overlapped(parts.backward, own_parameters, sizes)
    loss, split = parts.loss, parts.split
    if loss is not None:
        loss = replace(loss, backward=overlapped(loss.backward, own_parameters, sizes))
    if split is not None:
        inputs = overlapped(split.inputs, (), sizes)  # it has no gradients of parameters
        split = SplitBackward(inputs, overlapped(split.weights, own_parameters, sizes))
    return replace(parts, backward=backward, loss=loss, split=split)


def overlapped(
    graph: Graph, own_parameters: Collection[int] = (), sizes: Sizes | None = None
) -> Graph:
    """Copy ``graph`` in another order, with waits; return it as it is where nothing would wait."""
    # Scheduled on the example's sizes, in which memory can be compared; carried out on the twins.
    example = Concretizer(sizes)
    schedule = _schedule(example.graph(graph), own_parameters)
    if schedule is None:
        return graph
    order, waits = schedule
    twins = {
        example.twin(user): list(map(example.twin, started)) for user, started in waits.items()
    }
    return _with_waits(graph, list(map(example.twin, order)), twins)


def _schedule(
    graph: Graph, own_parameters: Collection[int]
) -> tuple[list[Node], dict[Node, list[Node]]] | None:
    """Return the order, and collectives by the node that waits for them; ``None``: none would."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    limit_bytes = backward_peak_bytes(graph, own_parameters)
    # Everything that a collective needs keeps its place: to defer that would delay the collective.
    undeferred, blocking = ancestors(filter(is_collective, nodes)), set[Node]()
    # Start with everything deferred, and take back what the peak shows not to fit. It ends, since
    # each round adds to one of the two sets or returns.
    while True:
        order = _order(nodes, undeferred)
        waits = _waits(order, blocking)
        if not waits:
            return None
        peak_bytes, moment = peak_in_order(graph, own_parameters, order, waits)
        if moment is None or peak_bytes <= limit_bytes:
            for node in nodes:
                if node in blocking:
                    report_of(Pass.OVERLAP).decline(node, "on its way it would raise the peak")
            return order, waits
        culprits = _deferred_beyond(moment, nodes, order, undeferred)
        sent = _under_way(moment, order, waits)
        # Deferred work first: it keeps its operands alive, and without it the collective still
        # overlaps with the rest. The one with the largest operands frees the most.
        if culprits:
            needed = ancestors([max(culprits, key=_operand_bytes)])
            undeferred.update(node for node in needed if node.op == "call_function")
        elif sent:
            blocking |= sent
        else:
            return None


def _deferred_beyond(
    moment: Node, nodes: Sequence[Node], order: Sequence[Node], undeferred: Collection[Node]
) -> list[Node]:
    """Nodes that ran before ``moment``, or at it, and no longer run before it."""
    before = set(nodes[: nodes.index(moment) + 1])
    after = order[order.index(moment) :]
    return [n for n in after if n in before and n not in undeferred and not _comes_with_others(n)]


def _under_way(
    moment: Node, order: Sequence[Node], waits: Mapping[Node, Sequence[Node]]
) -> set[Node]:
    """Collectives that have been started and not been waited for at ``moment``."""
    position = {node: index for index, node in enumerate(order)}
    now = position[moment]
    return {
        node
        for user, started in waits.items()
        for node in started
        if position[node] <= now <= position[user]
    }


def _with_waits(graph: Graph, order: Sequence[Node], waits: Mapping[Node, Sequence[Node]]) -> Graph:
    """Copy ``graph`` in ``order``, each wait in front of the node that needs it."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = copy.node_copy(node)
    for node in order:
        for started in waits.get(node, ()):
            source = copies[started]
            # Later nodes find the wait in the collective's place: nothing else reads what is sent.
            copies[started] = make_like(
                copy, _wait, (source, source.args[3]),
                like=source, origin=Pass.OVERLAP, name=f"{source.name}_arrived",
            )  # fmt: skip
            report_of(Pass.OVERLAP).rewrote(kind="wait")
        copies[node] = copy.node_copy(node, copies.__getitem__)
    copy.node_copy(graph.output_node(), copies.__getitem__)
    copy.lint()
    return copy


def _order(nodes: Sequence[Node], undeferred: Collection[Node]) -> list[Node]:
    """Order ``undeferred`` as it was, and all others behind the next collective.

    Views come in front of their first use, parts of results behind the operator that made them.
    """
    order: dict[Node, None] = {}
    deferred: list[Node] = []
    for node in nodes:
        if _comes_with_others(node):
            continue
        if node not in undeferred:
            deferred.append(node)
            continue
        _place(node, order)
        if is_collective(node):
            for waiting in deferred:
                _place(waiting, order)
            deferred.clear()
    # No collective comes any more; then views that only the output reads.
    for node in (*deferred, *nodes):
        if node not in order:
            _place(node, order)
    return list(order)


def _place(node: Node, order: dict[Node, None]) -> None:
    """Append ``node``, its views before it and its parts behind it."""
    for source in node.all_input_nodes:
        if is_view(source) and source not in order:
            _place(source, order)
    order[node] = None
    order.update((user, None) for user in node.users if is_part(user))


def _operand_bytes(node: Node) -> int:
    """Bytes that ``node`` keeps alive until it runs; arguments live anyway."""
    owners = {base(source) for source in node.all_input_nodes}
    return sum(tensor_bytes(o.meta["val"]) for o in owners if o.op != "placeholder")


def _comes_with_others(node: Node) -> bool:
    # No work of their own: a view costs nothing, a part is there with its operator.
    return is_view(node) or is_part(node)


def _waits(order: Sequence[Node], blocking: Collection[Node]) -> dict[Node, list[Node]]:
    """Collectives by the node that uses them first, where work runs in between.

    Those in ``blocking`` are waited for where they are started.
    """
    position = {node: index for index, node in enumerate(order)}
    waits: dict[Node, list[Node]] = {}
    for node in order:
        # The output node has no position: a collective that is only returned blocks.
        users = [user for user in node.users if user in position]
        if collective_of(node) is None or not users or node in blocking:
            continue
        first = min(users, key=position.__getitem__)
        between = order[position[node] + 1 : position[first]]
        if not all(map(_comes_with_others, between)):
            waits.setdefault(first, []).append(node)
    return waits
