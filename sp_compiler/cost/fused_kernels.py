"""Memory traffic of a function whose neighbouring elementwise operators are fused into one kernel.

Inductor fuses operators between two collectives this way, and so do hand-written kernels (a softmax
with its scale and mask, a dropout with its residual sum): a value that only the kernel itself reads
is never written to memory, and a value that several of its operators read is read once. A row-wise
operator (a softmax, a norm) ends a kernel: with this assumption the times are close to those
measured for hand-fused kernels (``docs/paper.md``), and Inductor, which often fuses more, can only
be faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from sp_compiler.cost.node_cost import node_collectives, tensor_bytes
from sp_compiler.ir.op_traits import DRAWS, base, is_part, is_tagged_pointwise, is_view, is_wait

_aten = torch.ops.aten
# Their results need the whole row, which ends a kernel.
_ROW_WISE = frozenset(
    {
        _aten._softmax.default,
        _aten._softmax_backward_data.default,
        _aten._log_softmax.default,
        _aten._log_softmax_backward_data.default,
        _aten.native_layer_norm.default,
        _aten.native_layer_norm_backward.default,
        _aten._fused_rms_norm.default,
        _aten._fused_rms_norm_backward.default,
    }
)
# Elementwise, but not tagged so by torch.
_POINTWISE = frozenset(
    {
        _aten.native_dropout_backward.default,
        _aten._to_copy.default,
        _aten.clone.default,
        *DRAWS,
    }
)
_FUSED = _ROW_WISE | _POINTWISE


def fused_bytes(graph: Graph, kernels: Mapping[Node, int] | None = None) -> dict[Node, int]:
    """Return the bytes that each node of a kernel reads and writes in memory; others are omitted.

    The traffic of a kernel is the sum over its nodes: an outside value counts at its first reader,
    a result at the node that makes it.

    Args:
        kernels: what :func:`kernels_of` returns, if it is known.
    """
    kernels = kernels_of(graph) if kernels is None else kernels
    read: set[tuple[int, Node]] = set()
    traffic: dict[Node, int] = {}
    for node, kernel in kernels.items():
        num_bytes = 0
        for source in node.all_input_nodes:
            owner = _maker(source)
            if kernels.get(owner) == kernel or (kernel, owner) in read:
                continue
            read.add((kernel, owner))
            # The smaller one: only the slice is read, and of an expanded value its own elements.
            num_bytes += min(tensor_bytes(each.meta["val"]) for each in (source, owner))
        if any(kernels.get(user) != kernel for user in _readers(node)):
            num_bytes += tensor_bytes(node.meta["val"])
        traffic[node] = num_bytes
    return traffic


def kernels_of(graph: Graph) -> dict[Node, int]:
    """Return the number of the kernel of every node that can be fused."""
    kernels: dict[Node, int] = {}
    merged_into: dict[int, int] = {}

    def root(kernel: int) -> int:
        passed = []
        while kernel in merged_into:
            passed.append(kernel)
            kernel = merged_into[kernel]
        merged_into.update(dict.fromkeys(passed, kernel))  # path compression
        return kernel

    # The maximum number of unfused operators on a path to a node. Two neighbours with the same
    # number have none between them on any path, so that fusing them creates no cycle of kernels.
    depth: dict[Node, int] = {}
    between_collectives = 0
    place: dict[Node, tuple[int, int]] = {}
    for node in graph.nodes:
        depth[node] = max((depth[source] for source in node.all_input_nodes), default=0)
        if node.op != "call_function":
            continue
        # First, because a collective that writes into its operand is a view of it.
        if node_collectives(node) or is_wait(node):
            between_collectives += 1
        if is_view(node) or is_part(node):
            continue
        if not _is_fused(node):
            depth[node] += 1
            continue
        place[node] = between_collectives, depth[node]
        own = len(kernels)
        kernels[node] = own
        for source in map(_maker, node.all_input_nodes):
            other = root(kernels[source]) if source in kernels else own
            if other != own and place[source] == place[node] and source.target not in _ROW_WISE:
                merged_into[other] = own
    return {node: root(kernel) for node, kernel in kernels.items()}


def _is_fused(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node_collectives(node):
        return False
    return node.target in _FUSED or is_tagged_pointwise(node)


def _maker(node: Node) -> Node:
    """Return the operator that made the storage of ``node``."""
    owner = base(node)
    return base(owner.args[0]) if is_part(owner) else owner


def _readers(node: Node) -> set[Node]:
    """Return the nodes that read a result of ``node``, other than views."""
    readers: set[Node] = set()
    for user in node.users:
        readers |= _readers(user) if is_view(user) or is_part(user) else {user}
    return readers
