"""Nodes, collectives, arithmetic and saved bytes of all graphs of one side."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from sp_compiler.cost.node_cost import merged, node_collectives, node_flops, product_flops
from sp_compiler.graph_diff.data import Totals
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.snapshot import (
    BACKWARD,
    IN_CHUNKS,
    LOSS_BACKWARD,
    SECOND_WAYS,
    Snapshot,
    region_of,
)
from sp_compiler.ir.symbolic import NotSymbolic, is_open
from sp_compiler.ops.registry import Collective

_NO_WORK = ("placeholder", "get_attr", "output")


def totals(stage: Snapshot) -> Totals:
    """Sum up ``stage``, counting each graph once per layer that uses it."""
    num_nodes, counted = 0, set[str]()
    flops: int | None = 0
    collectives: list[Collective] = []
    for name, graph in stage.graphs.items():
        # A step runs one backward: the one from the loss only, if there is one. It also runs only
        # one of the variants for different numbers of chunks.
        if name.endswith(BACKWARD) and f"{region_of(name)}{LOSS_BACKWARD}" in stage.graphs:
            continue
        if name.endswith(SECOND_WAYS):
            continue
        if IN_CHUNKS in name and region_of(name) in counted:
            continue
        counted.add(region_of(name))
        count = max(1, len(stage.paths(name)))
        calls = _sized_calls(graph)
        num_nodes += count * sum(node.op not in _NO_WORK for node in graph.nodes)
        if flops is not None and calls is not None:
            # Hardware FLOPs, or those of the products in a forward that is not decomposed yet.
            own = sum(node_flops(node)[1] or int(product_flops(node)) for node in calls)
            flops += count * own
        else:
            flops = None
        collectives += [
            Collective(item.kind, item.count * count, item.num_bytes * count)
            for node in calls or ()
            for item in node_collectives(node)
        ]
    calls_of = {name: max(1, len(stage.paths(name))) for name in stage.kept}
    kept_bytes = sum(num_bytes * calls_of[name] for name, num_bytes in stage.kept.items())
    kept = kept_bytes if stage.kept else None
    return Totals(stage.name, num_nodes, merged(collectives), flops, kept)


def _sized_calls(graph: Graph) -> list[Node] | None:
    """Return the calls in ``graph`` at the example's sizes; ``None`` if it has no shapes."""
    values = [node.meta.get("val") for node in graph.nodes if node.op != "output"]
    if any(value is None for value in values):
        return None
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    if any(is_open(size) for tensor in tensors for size in tensor.shape):
        try:
            graph = Concretizer(None).copied(graph)
        except NotSymbolic:  # a size that depends on data
            return None
    return [node for node in graph.nodes if node.op not in _NO_WORK]
