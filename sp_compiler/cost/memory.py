"""Peak memory of one generated function, beside its arguments.

Counted are storages that the generated code makes and its ``del`` statements free, what dropout
needs to draw its masks and what collectives copy; scratch memory inside PyTorch's own operators is
not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch.fx import Graph, Node

from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.op_traits import base, is_part, is_wait
from sp_compiler.ops.registry import operator_of


def function_peak_bytes(graph: Graph) -> int:
    """Return the most bytes that one generated function holds at once, beside its arguments."""
    return _function_peak(graph, _calls(graph))[0]


def backward_peak_bytes(graph: Graph, own_parameters: Collection[int]) -> int:
    """Return the same of a backward, without the gradients of ``own_parameters``.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
    """
    # Those gradients are no activations: the plan counts them among the gradients of the model.
    return _function_peak(graph, _calls(graph), _own_grads(graph, own_parameters))[0]


def peak_in_order(
    graph: Graph,
    own_parameters: Collection[int],
    order: Sequence[Node],
    waits: Mapping[Node, Sequence[Node]],
) -> tuple[int, Node | None]:
    """Return :func:`backward_peak_bytes` as if the calls of ``graph`` ran in another ``order``.

    Args:
        waits: by call, the collectives that are waited for just before it.

    Returns:
        The bytes, and the call that runs when they are reached first.
    """
    return _function_peak(graph, order, _own_grads(graph, own_parameters), waits)


def _calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _own_grads(graph: Graph, own_parameters: Collection[int]) -> list[Node]:
    grads = graph.output_node().args[0]
    return [grad for index in own_parameters if (grad := grads[index]) is not None]


def _function_peak(
    graph: Graph,
    order: Sequence[Node],
    ignored: Iterable[Node] = (),
    waits: Mapping[Node, Sequence[Node]] | None = None,
) -> tuple[int, Node | None]:
    """Return the peak, and the call that reaches it first; storages in ``ignored`` do not count.

    Takes time in proportion to the nodes: the overlap pass asks it for every order that it tries.
    """
    skipped = {base(node) for node in ignored}
    # What the function returns does not die in it.
    returned = {base(node) for node in graph.output_node().all_input_nodes}
    last_use: dict[Node, int] = {}
    for position, node in enumerate(order):
        # Until it is waited for, a collective holds what it sends. In a graph with waits it lives
        # to the end of the wait; of waits that are only planned, which have no position of their
        # own, to the end of the call in front.
        arrived = [node.all_input_nodes[0]] if is_wait(node) else (waits or {}).get(node, ())
        for started in arrived:
            sent = base(started.all_input_nodes[0])
            last_use[sent] = position if is_wait(node) else position - 1
        # The node itself as well: a result that nobody reads dies where it is made.
        last_use.update((base(used), position) for used in (node, *node.all_input_nodes))
    dying: dict[int, list[Node]] = {}
    for storage, position in last_use.items():
        # Arguments belong to the caller, which frees them when the function has returned.
        if storage.op != "placeholder" and storage not in returned and storage not in skipped:
            dying.setdefault(position, []).append(storage)
    live = peak = 0
    moment: Node | None = None
    for position, node in enumerate(order):
        # A view makes nothing, and a part was counted with the operator that made it.
        if base(node) is node and not is_part(node):
            parts = [user for user in node.users if is_part(user)]
            left_out = sum(tensor_bytes(r.meta["val"]) for r in (node, *parts) if r in skipped)
            # All results, of which the next line frees those without a name.
            now = live + tensor_bytes(node.meta["val"]) - left_out + scratch_bytes(node)
            if now > peak:
                peak, moment = now, node
            # Storages that outlive the statement: of several results those with a name.
            is_several = isinstance(node.meta["val"], (list, tuple))
            results = [user for user in node.users if base(user) is user] if is_several else [node]
            live += sum(owned_bytes(made) for made in results if made not in skipped)
        # Behind the call: its operands live while it runs.
        live -= sum(owned_bytes(storage) for storage in dying.get(position, ()))
    return peak, moment


def scratch_bytes(node: Node) -> int:
    """Bytes that the operator allocates inside, beside its result: known of our own alone."""
    ours = operator_of(node.target)
    return 0 if ours is None else ours.scratch_bytes(arguments(node), node.meta["val"])


def owned_bytes(node: Node) -> int:
    """Bytes of the storage behind ``node``; 0 for several results, each of which has its own."""
    return 0 if isinstance(node.meta["val"], (list, tuple)) else tensor_bytes(node.meta["val"])
