"""Peak memory of one generated function, without its arguments.

It counts storages that the generated code creates and its ``del`` statements free, memory for
drawing dropout masks, and copies for collectives; scratch memory inside PyTorch's own operators is
unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.op_traits import (
    base,
    collective_of,
    is_handed,
    is_part,
    is_started,
    is_tagged_pointwise,
    is_wait,
)
from sp_compiler.ops.convert import copied_to_send_bytes, joined_bytes, received_padding_bytes
from sp_compiler.ops.registry import operator_of

_aten = torch.ops.aten


def function_peak_bytes(graph: Graph) -> int:
    """Return the peak of bytes that one generated function allocates."""
    return _function_peak(graph)


def backward_peak_bytes(graph: Graph, own_parameters: Collection[int]) -> int:
    """Return the peak of a backward, without the gradients of ``own_parameters``.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
    """
    # Those gradients are not activations: the plan counts them as gradients of the model.
    return _function_peak(graph, own_gradients(graph, own_parameters))


def own_gradients(graph: Graph, own_parameters: Collection[int]) -> list[Node]:
    """Gradients of ``own_parameters`` that the backward ``graph`` returns and that are not copied.

    One that is not contiguous is copied into ``grad`` in the layout of the parameter: the tensor
    that the backward made is temporary.
    """
    gradients = graph.output_node().args[0]
    returned = (gradients[index] for index in own_parameters)
    return [grad for grad in returned if grad is not None and grad.meta["val"].is_contiguous()]


def _function_peak(graph: Graph, ignored: Iterable[Node] = ()) -> int:
    """Return the peak; storages in ``ignored`` do not count."""
    skipped = {base(node) for node in ignored}
    # A result of the function does not die in it.
    returned = {base(node) for node in graph.output_node().all_input_nodes}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    last_use: dict[Node, int] = {}
    for position, node in enumerate(calls):
        last_use.update((base(sent), position) for sent in sent_operands(node))
        # Also the node itself: a result that nobody reads dies where it is made.
        last_use.update((base(used), position) for used in (node, *node.all_input_nodes))
    dying: dict[int, list[Node]] = {}
    for storage, position in last_use.items():
        # Arguments belong to the caller, which frees them when the function has returned.
        own = storage.op != "placeholder" or is_handed(storage)
        if own and storage not in returned and storage not in skipped:
            dying.setdefault(position, []).append(storage)
    live = peak = sum(map(owned_bytes, filter(is_handed, graph.find_nodes(op="placeholder"))))
    for position, node in enumerate(calls):
        # A view allocates nothing, and a part was counted with the operator that made it.
        if base(node) is node and not is_part(node):
            during_bytes, after_bytes = call_scratch_bytes(node)
            later_bytes = scratch_bytes(node) - during_bytes
            peak = max(peak, live + run_bytes(node, skipped) - later_bytes)
            live += sum(owned_bytes(made) for made in made_storages(node) if made not in skipped)
            live += after_bytes
        elif is_wait(node):
            peak = max(peak, live + arrival_bytes(node.all_input_nodes[0]))
            live -= in_flight_bytes(node.all_input_nodes[0])
        # After the call: its operands live while it runs.
        live -= sum(owned_bytes(storage) for storage in dying.get(position, ()))
    return peak


def run_bytes(node: Node, ignored: Container[Node] = ()) -> int:
    """Return the bytes allocated while ``node`` runs: all results, and scratch memory.

    This includes unnamed results, which the next line frees; those in ``ignored`` do not count.
    """
    results = (node, *(user for user in node.users if is_part(user)))
    left_out = sum(tensor_bytes(result.meta["val"]) for result in results if result in ignored)
    return tensor_bytes(node.meta["val"]) - left_out + scratch_bytes(node)


def scratch_bytes(node: Node) -> int:
    """Return the bytes that the operator allocates in addition to its result; known for our own
    operators, ``where`` with a scalar, and pointwise operators of lazy conjugates."""
    if node.target is _aten.where.ScalarSelf:
        return node.meta["val"].element_size()  # the scalar as a tensor, which the kernel reads
    ours = operator_of(node.target)
    if ours is not None:
        return ours.scratch_bytes(arguments(node), node.meta["val"])
    if not is_tagged_pointwise(node) or node.target is _aten.conj_physical.default:
        return 0
    # Conjugated in a copy first (ATen/ConjugateFallback.cpp), as often as they are operands.
    values = [x.meta["val"] for x in node.args if isinstance(x, Node)]
    return sum(tensor_bytes(x) for x in values if isinstance(x, Tensor) and x.is_conj())


def call_scratch_bytes(node: Node) -> tuple[int, int]:
    """Return the bytes that a call allocates in addition to its result while it runs, and those of
    them that outlive it: what a collective that is only started holds until it has arrived."""
    if is_wait(node):
        return arrival_bytes(node.all_input_nodes[0]), 0
    if is_started(node):
        return start_bytes(node), in_flight_bytes(node)
    return scratch_bytes(node), 0


def start_bytes(node: Node) -> int:
    """Return the scratch bytes that an operator allocates when it starts: of a gather only what it
    holds until it has arrived, of other operators all."""
    return in_flight_bytes(node) if collective_of(node) == "all_gather" else scratch_bytes(node)


def in_flight_bytes(node: Node) -> int:
    """Return the bytes that a collective holds from its start until it has arrived, without those
    of its result: of a copy that it sends, and of the padding that it receives."""
    if collective_of(node) is None:
        return 0
    return sent_copy_bytes(node) + received_padding_bytes(arguments(node), node.meta["val"])


def sent_copy_bytes(node: Node) -> int:
    """Return the bytes of the copy that a collective sends instead of its operand."""
    if collective_of(node) is None:
        return 0
    return copied_to_send_bytes(arguments(node), node.meta["val"])


def sent_operands(node: Node) -> list[Node]:
    """Return the values that a collective holds until ``node`` has waited for it; none if it sends
    a copy, or if ``node`` is no wait."""
    if not is_wait(node) or sent_copy_bytes(node.all_input_nodes[0]):
        return []
    return node.all_input_nodes[0].all_input_nodes


def arrival_bytes(node: Node) -> int:
    """Return the bytes that a collective allocates only when it has arrived."""
    if collective_of(node) is None:
        return 0
    return joined_bytes(arguments(node), node.meta["val"])


def made_storages(node: Node) -> list[Node]:
    """Return the nodes whose storages outlive the statement of ``node``; if it has several results,
    the named ones."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return [node]
    return [user for user in node.users if base(user) is user]


def owned_bytes(node: Node) -> int:
    """Return the bytes of the storage of ``node``; 0 for several results, which have their own
    storages."""
    return 0 if isinstance(node.meta["val"], (list, tuple)) else tensor_bytes(node.meta["val"])
