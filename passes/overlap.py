"""Run work of backward that nothing waits for while collectives are on their way.

What no collective of the same graph depends on, as the gradients of weights, is put off until the
next collective has been started; what needs a collective's result waits for it, and not before::

    grad_w = mm(t(g), x)             grad_x = mm(g, w)
    grad_x = mm(g, w)          ->    started = convert(grad_x, P, S(0))
    grad_x = convert(...)            grad_w = mm(t(g), x)
    ... grad_x ...                   arrived = wait(started)
                                     ... arrived ...

This is the order of Megatron-LM's linear layers (Korthikanti et al. 2022, section 4.2.2), and where
backward gathers its gradient before it computes the forward again, that is computed meanwhile.
Memory comes first: nothing is put off where the peak of the backward would be higher for it.

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
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import ancestors
from sp_compiler.ir.op_traits import base, collective_of, is_collective, is_part, is_view
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.ops.convert import WAIT

_wait = WAIT.overload


def overlap_backward(
    parts: Partitioned, own_parameters: Collection[int], sizes: Sizes | None = None
) -> Partitioned:
    """``parts``, which is left as it is, with backwards in which work runs under collectives.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        sizes: what is open; memory is that of the example's sizes.
    """
    if parts.backward is None:
        return parts
    backward = overlapped(parts.backward, own_parameters, sizes)
    loss = parts.loss
    if loss is not None:
        loss = replace(loss, backward=overlapped(loss.backward, own_parameters, sizes))
    return replace(parts, backward=backward, loss=loss)


def overlapped(
    graph: Graph, own_parameters: Collection[int] = (), sizes: Sizes | None = None
) -> Graph:
    """A copy of ``graph`` in another order, with waits; itself where nothing would wait."""
    example = Concretizer(sizes)
    found = _schedule(example.graph(graph), own_parameters)
    if found is None:
        return graph
    order, waits = found
    twins = {
        example.twin(user): list(map(example.twin, started)) for user, started in waits.items()
    }
    return _with_waits(graph, list(map(example.twin, order)), twins)


def _schedule(
    graph: Graph, own_parameters: Collection[int]
) -> tuple[list[Node], dict[Node, list[Node]]] | None:
    """The order, and collectives by the node that waits for them; ``None``: nothing would."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    limit_bytes = backward_peak_bytes(graph, own_parameters)
    at_once, at_rest = ancestors(filter(is_collective, nodes)), set[Node]()
    while True:
        order = _order(nodes, at_once)
        waits = _waits(order, at_rest)
        if not waits:
            return None
        peak_bytes, moment = peak_in_order(graph, own_parameters, order, waits)
        if moment is None or peak_bytes <= limit_bytes:
            for node in nodes:
                if node in at_rest:
                    report_of(Pass.OVERLAP).decline(node, "on its way it would raise the peak")
            return order, waits
        culprits = _put_off_beyond(moment, nodes, order, at_once)
        sent = _under_way(moment, order, waits)
        if culprits:
            needed = ancestors([max(culprits, key=_operand_bytes)])
            at_once.update(node for node in needed if node.op == "call_function")
        elif sent:
            at_rest |= sent
        else:
            return None


def _put_off_beyond(
    moment: Node, nodes: Sequence[Node], order: Sequence[Node], at_once: Collection[Node]
) -> list[Node]:
    """What ran before ``moment``, or is it, and now does not run before it."""
    before = set(nodes[: nodes.index(moment) + 1])
    after = order[order.index(moment) :]
    return [n for n in after if n in before and n not in at_once and not _comes_with_others(n)]


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
    """A copy of ``graph`` in ``order``."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = copy.node_copy(node)
    for node in order:
        for started in waits.get(node, ()):
            copies[started] = _wait_for(copy, copies[started])
            report_of(Pass.OVERLAP).rewrote(kind="wait")
        copies[node] = copy.node_copy(node, copies.__getitem__)
    copy.node_copy(graph.output_node(), copies.__getitem__)
    copy.lint()
    return copy


def _order(nodes: Sequence[Node], at_once: Collection[Node]) -> list[Node]:
    """``at_once`` as it was, all else behind the next collective.

    Views are put in front of their first use, parts of results behind what they are parts of.
    """
    order: dict[Node, None] = {}
    put_off: list[Node] = []
    for node in nodes:
        if _comes_with_others(node):
            continue
        if node not in at_once:
            put_off.append(node)
            continue
        _place(node, order)
        if is_collective(node):
            for waiting in put_off:
                _place(waiting, order)
            put_off.clear()
    for node in (*put_off, *nodes):
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
    """Bytes that exist for ``node``."""
    owners = {base(source) for source in node.all_input_nodes}
    return sum(tensor_bytes(o.meta["val"]) for o in owners if o.op != "placeholder")


def _comes_with_others(node: Node) -> bool:
    return is_view(node) or is_part(node)


def _waits(order: Sequence[Node], at_rest: Collection[Node]) -> dict[Node, list[Node]]:
    """Collectives by the node that uses them first, where that is not the next one.

    Those ``at_rest`` are waited for where they are started.
    """
    position = {node: index for index, node in enumerate(order)}
    waits: dict[Node, list[Node]] = {}
    for node in order:
        users = [user for user in node.users if user in position]
        if collective_of(node) is None or not users or node in at_rest:
            continue
        first = min(users, key=position.__getitem__)
        if _works_between(order[position[node] + 1 : position[first]]):
            waits.setdefault(first, []).append(node)
    return waits


def _works_between(nodes: Collection[Node]) -> bool:
    return not all(map(_comes_with_others, nodes))


def _wait_for(graph: Graph, started: Node) -> Node:
    name, world_size = f"{started.name}_arrived", started.args[3]
    return make_like(
        graph, _wait, (started, world_size), like=started, origin=Pass.OVERLAP, name=name
    )
