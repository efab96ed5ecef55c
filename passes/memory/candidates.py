"""Candidate splits of one region: from the one that saves least to the fastest.

They do not depend on a budget. They are the choices of :mod:`sp_compiler.solve.recompute_frontier`
and of the named policies, each partitioned and measured. :func:`offloads` are more choices, which
send values to the host: as many as the link carries while an equal block runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.units import time_text
from sp_compiler.cost.fused_kernels import fused_bytes
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.host_transfers import beside_us, transfers_us
from sp_compiler.cost.memory import backward_peak_bytes, function_peak_bytes
from sp_compiler.cost.node_cost import (
    collectives_us,
    compute_us,
    elapsed_us,
    node_collectives,
    tensor_bytes,
)
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import ancestors
from sp_compiler.ir.op_traits import base, has_inner_communication
from sp_compiler.passes.memory.partition import PartitionOptions, partition_and_overlap
from sp_compiler.passes.memory.recompute_policy import Tag
from sp_compiler.passes.memory.tag import POLICIES, tag_recompute, tags_of, write_tags
from sp_compiler.solve.recompute_frontier import Choice, ForwardValue, frontier
from sp_compiler.trace.joint import JointGraph


@dataclass(frozen=True)
class Candidate:
    """One way to split a region.

    Attributes:
        joint: the graph that is split.
        tags: tag of every forward node.
        partitioned: forward and backward by these tags.
        time_us: estimated time of its forward and backward, including what copies to the host and
            back add between equal blocks.
        forward_peak_bytes: peak of the forward, without its arguments.
        backward_peak_bytes: peak of the backward, without its arguments.
    """

    joint: JointGraph
    tags: Mapping[Node, Tag]
    partitioned: Partitioned
    time_us: float
    forward_peak_bytes: int
    backward_peak_bytes: int


def candidates(
    joint: JointGraph,
    world_size: int,
    *,
    options: PartitionOptions,
    free: frozenset[int],
) -> list[Candidate]:
    """Split ``joint``, whose tags are overwritten; the candidate that saves least comes first.

    Args:
        world_size: number of tensor-parallel ranks.
        options: partition options, the same for each of them.
        free: outputs of the region that live until backward anyway because the model returns them.
    """
    nodes, values = recompute_problem(joint, world_size, free, options)
    # The frontier first: if a policy saves the same, reasons that state times are better.
    solved = [_tags(nodes, values, choice) for choice in frontier(values)]
    named = [_policy_tags(joint, policy) for policy in POLICIES]
    return _distinct(joint, [*solved, *named], world_size, options)


def offloads(
    joint: JointGraph,
    world_size: int,
    *,
    options: PartitionOptions,
    free: frozenset[int],
    own_inputs: frozenset[int],
    num_calls: int,
) -> list[Candidate]:
    """Return candidates that send something to the host, as :func:`candidates` does.

    Args:
        own_inputs: inputs that die with each call of the region, which may be sent to the host.
        num_calls: calls of the region: the device holds at once what two of them send.
    """
    nodes, values = recompute_problem(joint, world_size, free, options)
    sendable = _sendable(joint, nodes, values, free, own_inputs, num_calls, options.hardware)
    choices = frontier(sendable, host_us=_forward_us(nodes, values))
    tags = [_tags(nodes, values, choice) for choice in choices if choice.sent]
    return _undominated(_distinct(joint, tags, world_size, options))


def _undominated(ways: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other candidate matches or beats in every respect."""
    costs = [
        (
            *(way.time_us, way.partitioned.kept_bytes, way.partitioned.sent_bytes),
            *(way.forward_peak_bytes, way.backward_peak_bytes),
        )
        for way in ways
    ]

    def beats(other: int, index: int) -> bool:
        pairs = list(zip(costs[other], costs[index], strict=True))
        # Of equal ones the first is kept.
        return all(a <= b for a, b in pairs) and (costs[other] != costs[index] or other < index)

    count = range(len(ways))
    return [way for i, way in enumerate(ways) if not any(beats(j, i) for j in count if j != i)]


def _distinct(
    joint: JointGraph,
    choices: Sequence[dict[Node, Tag]],
    world_size: int,
    options: PartitionOptions,
) -> list[Candidate]:
    distinct: dict[tuple[tuple[str, bool], ...], Candidate] = {}
    for tags in choices:
        # Partitioned and measured, not estimated: views, shared storages and the schedule change
        # what tags promise.
        write_tags(joint, tags)
        way = measured(joint, tags, world_size, options)
        names = tuple(sorted((tensor.name, tensor.on_host) for tensor in way.partitioned.saved))
        # What is saved determines the rest: of equal ones the first has the better reasons.
        distinct.setdefault(names, way)
    return sorted(distinct.values(), key=lambda each: (each.partitioned.kept_bytes, each.time_us))


def _policy_tags(joint: JointGraph, policy: str) -> dict[Node, Tag]:
    tag_recompute(joint, policy)
    return tags_of(joint)


def measured(
    joint: JointGraph, tags: Mapping[Node, Tag], world_size: int, options: PartitionOptions
) -> Candidate:
    """Return the candidate for ``joint`` with its current ``tags``."""
    parts = partition_and_overlap(joint, options)
    graph, hardware = parts.step_backward, options.hardware

    def elapsed(function: Graph) -> float:
        traffic = fused_bytes(function) if options.fused else None
        return elapsed_us(function, world_size, hardware, traffic)

    forward_us, backward_us, peak_bytes = elapsed(parts.forward), 0.0, 0
    if graph is not None:
        backward_us = elapsed(graph)
        peak_bytes = backward_peak_bytes(graph, options.own_parameters)
    time_us = forward_us + backward_us + beside_us(parts.sent_bytes, hardware)
    # Each direction runs concurrently with the equal call after, or before.
    link_us = transfers_us(parts, hardware)
    time_us += max(0.0, link_us - forward_us) + max(0.0, link_us - backward_us)
    return Candidate(joint, tags, parts, time_us, function_peak_bytes(parts.forward), peak_bytes)


def _tags(nodes: Sequence[Node], values: Sequence[ForwardValue], choice: Choice) -> dict[Node, Tag]:
    chosen: dict[Node, Tag] = {}
    for index, (node, value) in enumerate(zip(nodes, values, strict=True)):
        price = time_text(value.time_us)
        if index in choice.sent:
            chosen[node] = ("offload", "copied to the host while the next layer runs")
        elif node.op != "call_function":
            continue
        # Rerunning an operator that communicates internally would repeat its collectives.
        elif index in choice.kept or has_inner_communication(node):
            chosen[node] = ("save", f"worth its memory: {price} to recompute")
        else:
            chosen[node] = ("recompute", "cheaper than its memory")
    return chosen


def _forward_us(nodes: Sequence[Node], values: Sequence[ForwardValue]) -> float:
    """Time of a forward without overlap."""
    pairs = zip(nodes, values, strict=True)
    return sum(value.time_us for node, value in pairs if node.op == "call_function")


def _sendable(
    joint: JointGraph,
    nodes: Sequence[Node],
    values: Sequence[ForwardValue],
    free: frozenset[int],
    own_inputs: frozenset[int],
    num_calls: int,
    hardware: Hardware,
) -> list[ForwardValue]:
    """Return ``values`` with those marked that can be sent to the host."""
    inputs = {joint.inputs[index] for index in own_inputs}
    returned = {base(joint.outputs[index]) for index in free}
    return [
        replace(
            value,
            can_send=True,
            sent_bytes=math.ceil(2 * value.num_bytes / num_calls),
            send_us=hardware.host.transfer_us(value.num_bytes),
            beside_us=beside_us(value.num_bytes, hardware),
        )
        # Values that the model returns, inputs too, are on the device until backward anyway.
        if value.can_keep
        and value.num_bytes
        and node not in returned
        and (node.op == "call_function" or node in inputs)
        else value
        for node, value in zip(nodes, values, strict=True)
    ]


def _forward_values(joint: JointGraph) -> list[Node]:
    """Return forward nodes and values from other calls, in graph order."""
    backward = joint.backward_nodes()
    kinds = dict(zip(joint.inputs, joint.input_kinds, strict=True))
    return [
        node
        for node in joint.graph.nodes
        if (node.op == "call_function" and node not in backward) or kinds.get(node) == "call"
    ]


def recompute_problem(
    joint: JointGraph,
    world_size: int,
    free: frozenset[int],
    options: PartitionOptions,
) -> tuple[list[Node], list[ForwardValue]]:
    """Return the nodes that may be saved, and their values for the solver."""
    nodes, hardware = _forward_values(joint), options.hardware
    traffic = fused_bytes(joint.graph) if options.fused else None
    position = {node: index for index, node in enumerate(nodes)}
    needed = _needed(joint)
    costless = {base(joint.outputs[index]) for index in free}
    values = []
    for node in nodes:
        is_call = node.op == "call_function"
        # A view is saved by its base, a multi-result operator by its parts; the bytes are theirs.
        owns = base(node) is node and isinstance(node.meta["val"], Tensor)
        wait_us = collectives_us(node_collectives(node), world_size, hardware)
        time_us = compute_us(node, hardware, traffic) + wait_us
        values.append(
            ForwardValue(
                # Parameters and the user's inputs have no position: they exist, and reading them
                # again is free.
                parents=tuple(position[p] for p in node.all_input_nodes if p in position),
                # An output of the model exists until backward anyway.
                num_bytes=tensor_bytes(node.meta["val"]) if owns and node not in costless else 0,
                time_us=time_us if is_call else 0.0,
                needed=node in needed,
                # Saving the chunks of rows would save all rows.
                can_keep=owns and node.meta.get("chunk") != "part",
                can_repeat=is_call and not has_inner_communication(node),
            )
        )
    return nodes, values


def _needed(joint: JointGraph) -> set[Node]:
    """Return the forward values that backward reads."""
    backward = joint.backward_nodes()
    grads = [node for node in joint.grads if node is not None]
    # A gradient may be a forward value itself, such as a constant.
    needed = {node for node in grads if node not in backward}
    for node in ancestors(grads) & backward:
        needed.update(parent for parent in node.all_input_nodes if parent not in backward)
    return needed
