"""Partition a tagged joint graph into a forward and a backward, as the tags say.

A walk back from the gradients ends at forward values tagged ``"save"`` and at inputs of the region,
which forward passes to backward; a value tagged ``"recompute"`` is recomputed in backward just
before its first use. A saved view saves the tensor that owns its storage.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.cost.hardware import H100, Hardware
from sp_compiler.ir.forward_backward import LossPart, Partitioned, SavedTensor
from sp_compiler.ir.fx import ancestors, descendants
from sp_compiler.ir.op_traits import base
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.symbolic import Sizes, example_number, symbol_of, symbols_in
from sp_compiler.passes.memory.sums_in_place import reduce_in_place, sum_in_place
from sp_compiler.passes.memory.zero_tangents import drop_zero_tangents
from sp_compiler.passes.overlap import overlap_collectives
from sp_compiler.trace.autograd_functions.reached import drop_all
from sp_compiler.trace.joint import JointGraph


@dataclass(frozen=True)
class PartitionOptions:
    """Options for partitioning a region into forward and backward, derived from the program.

    Attributes:
        loss_output: index of the output that is the model's loss, from which a training step
            usually starts: it gets a separate backward if gradients may flow through others too.
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        overlap: whether kernels overlap with collectives.
        sizes: the program's open sizes.
        runs_last: whether backward starts with this region.
        hardware: profile for estimated times.
        fused: whether the backend fuses elementwise operators.
        world_size: number of ranks.
        reduce_in_place: whether all-reduces may write into their operands.
    """

    loss_output: int | None = None
    own_parameters: frozenset[int] = frozenset()
    overlap: bool = False
    sizes: Sizes | None = None
    runs_last: bool = False
    hardware: Hardware = H100
    fused: bool = False
    world_size: int = 1
    reduce_in_place: bool = False


def partition_and_overlap(joint: JointGraph, options: PartitionOptions) -> Partitioned:
    """Partition the tagged ``joint``, which is not modified, and schedule its forward and backward,
    to compare them with others."""
    parts = partition(joint, options)
    if not options.overlap:
        return parts
    own, sizes = options.own_parameters, options.sizes
    return overlap_collectives(
        parts, own, sizes, hardware=options.hardware, fused=options.fused, thorough=False
    )


def partition(joint: JointGraph, options: PartitionOptions | None = None) -> Partitioned:
    """Partition ``joint``, which is not modified.

    Args:
        joint: tagged.
        options: its ``loss_output``, ``world_size`` and ``reduce_in_place`` are read.

    Raises:
        PassError: a forward node without a tag.
    """
    options = options or PartitionOptions()
    grads = [node for node in joint.grads if node is not None]
    saved = _saved_nodes(joint, grads, joint.backward_nodes())
    forward = _forward_graph(joint, saved)
    backward = _backward_graph(joint, saved) if grads else None
    kinds = dict(zip(joint.inputs, joint.input_kinds, strict=True))
    # Counted separately: the two show the trade-off that the tags made.
    report = report_of(Pass.PARTITION)
    report.rewrote(len(saved), kind="saved")
    if backward is not None:
        recomputed = [node for node in backward.nodes if node.meta.get("recomputed")]
        report.rewrote(len(recomputed), kind="recomputed")
    records = tuple(_record(node, kinds.get(node, "activation")) for node in saved)
    # With a single tangent the backward is already the loss's.
    loss, output = None, options.loss_output
    if backward is not None and output is not None and len(joint.tangents) > 1:
        loss = LossPart(output, _loss_backward(backward, joint.tangent_outputs, output))
    # After the loss's backward is made: there a summand may be zero.
    backwards = [] if backward is None else [backward, *([] if loss is None else [loss.backward])]
    for graph in backwards:
        drop_all(graph)
        sum_in_place(graph, _of_parameters(graph, joint.input_kinds), options.world_size)
    for graph in (forward, *backwards) if options.reduce_in_place else ():
        reduce_in_place(graph)
    return Partitioned(forward, backward, records, joint.num_outputs, loss)


def _of_parameters(backward: Graph, input_kinds: Sequence[str]) -> list[Node]:
    grads: Sequence[Node | None] = backward.output_node().args[0]
    pairs = zip(grads, input_kinds, strict=True)
    return [grad for grad, kind in pairs if grad is not None and kind == "param"]


def _saved_nodes(joint: JointGraph, grads: Sequence[Node], backward: set[Node]) -> list[Node]:
    """Return the forward values that backward starts from, in graph order."""
    # Inputs exist anyway: reading one again is free, recomputing it impossible.
    ends = set(joint.inputs)
    for node in joint.graph.nodes:
        if node.op != "call_function" or node in backward:
            continue
        if node.meta.get("recompute") not in ("save", "offload", "recompute"):
            raise PassError(Pass.PARTITION, 'a forward node needs meta["recompute"]', node)
        if node.meta["recompute"] != "recompute":
            # The base of a view: the storage is saved, and the view is made again.
            ends.add(base(node))
    # Only what backward reaches: a tag says what may be saved, not what is needed.
    walked = ancestors(grads, ends)
    saved = walked & ends
    sizes = [node for node in joint.inputs if symbol_of(node) is not None]
    symbols = symbols_in([*(walked - ends), *joint.tangents]) if sizes else set()
    saved |= {node for node in sizes if symbol_of(node) in symbols}
    return [node for node in joint.graph.nodes if node in saved]


def _forward_graph(joint: JointGraph, saved: Sequence[Node]) -> Graph:
    needed = ancestors([*joint.outputs, *saved])
    graph = Graph()
    copies: dict[Node, Node] = {node: _placeholder(graph, node) for node in joint.inputs}
    for node in joint.graph.nodes:
        if node.op == "call_function" and node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    # The order is the runtime's contract: outputs, then saved tensors in the order of backward.
    graph.output(tuple(copies[node] for node in [*joint.outputs, *saved]))
    return graph


def _backward_graph(joint: JointGraph, saved: Sequence[Node]) -> Graph:
    order = {node: index for index, node in enumerate(joint.graph.nodes)}
    grads = [node for node in joint.grads if node is not None]
    # Values that depend on a tangent are backward proper; everything else it reads is recomputed.
    needed = ancestors(grads, set(saved)) & descendants(joint.tangents)
    graph = Graph()
    copies = {node: _placeholder(graph, node) for node in [*saved, *joint.tangents]}
    # The gradients last, for those that no tangent reaches.
    for node in [*sorted(needed, key=order.__getitem__), *grads]:
        # As late as possible, before the first gradient that reads it: a value recomputed early
        # would be held in memory while others run.
        missing = ancestors([node], copies).difference(copies)
        for pending in sorted(missing, key=order.__getitem__):
            copies[pending] = graph.node_copy(pending, copies.__getitem__)
            copies[pending].meta["recomputed"] = pending not in needed
    graph.output(tuple(None if node is None else copies[node] for node in joint.grads))
    return graph


def _loss_backward(backward: Graph, tangent_outputs: Sequence[int], loss_output: int) -> Graph:
    graph = copy_graph(backward)
    # Tangents come after the saved tensors.
    tangents = graph.find_nodes(op="placeholder")[-len(tangent_outputs) :]
    others = [
        node for node, out in zip(tangents, tangent_outputs, strict=True) if out != loss_output
    ]
    drop_zero_tangents(graph, tangents, others)
    return graph


def _placeholder(graph: Graph, node: Node) -> Node:
    copy = graph.placeholder(node.name)
    copy.meta = dict(node.meta)
    return copy


def _record(node: Node, kind: str) -> SavedTensor:
    value = node.meta["val"]
    is_tensor = isinstance(value, Tensor)
    shape = tuple(map(example_number, value.shape)) if is_tensor else ()
    # A part of several results is named by the operator that made them all; an input has none.
    source = node.args[0] if node.target is operator.getitem else node
    return SavedTensor(
        name=node.name,
        kind=kind,
        shape=shape,
        # An open size, which backward needs as a number.
        dtype=value.dtype if is_tensor else torch.int64,
        num_bytes=math.prod(shape) * value.element_size() if is_tensor else 0,
        module=module_path(node),
        line=source_line(node),
        op="" if node.op == "placeholder" else source.target.__name__.partition(".")[0],
        reason=node.meta.get("recompute_reason", "input of the region"),
        on_host=node.meta.get("recompute") == "offload",
    )
