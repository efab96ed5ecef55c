"""Facts about the forward nodes of a joint graph for recompute policies, derived from data flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compiler.ir.fx import ancestors, carries_gradient, placements_of
from sp_compiler.ir.op_traits import (
    NARROWING_VIEWS,
    base,
    is_cast,
    is_copy,
    is_view,
    matmul_factors,
    view_chain,
)
from sp_compiler.trace.joint import JointGraph

_EXPANDS = (torch.ops.aten.expand.default,)


@dataclass(frozen=True)
class ForwardFacts:
    """Sets of forward nodes.

    Attributes:
        constants: nodes that depend on no input of the region.
        from_params: parameters, buffers and constants seen through views, casts and conversions.
        linears: matmuls with such a factor.
        core: nodes from the matmul of two activations (the scores) up to the matmul that uses it.
        contexts: matmuls of an activation with a value computed from scores.
    """

    constants: frozenset[Node]
    from_params: frozenset[Node]
    linears: frozenset[Node]
    core: frozenset[Node]
    contexts: frozenset[Node]

    def copies_context(self, node: Node) -> bool:
        """Return whether ``node`` merges the heads: a full copy that takes no more memory than the
        context."""
        return (
            is_copy(node)
            and not is_cast(node)
            and base(node.args[0]) in self.contexts
            and all(view.target not in NARROWING_VIEWS for view in view_chain(node.args[0]))
            and not expands(node)
        )


def expands(copy: Node) -> bool:
    """Return whether ``copy`` materialises repeated elements of its source."""
    return any(view.target in _EXPANDS for view in view_chain(copy.args[0]))


def forward_facts(joint: JointGraph) -> ForwardFacts:
    """Find linears and attention cores, without looking at names or sizes."""
    backward = joint.backward_nodes()
    forward = [
        node for node in joint.graph.nodes if node.op == "call_function" and node not in backward
    ]
    kinds = dict(zip(joint.inputs, joint.input_kinds, strict=True))
    from_params = {n for n, kind in kinds.items() if kind in ("param", "buffer", "constant")}
    # Descendants of a linear, or of a differentiable value of another region, are activations.
    activations = {
        node
        for node, kind in kinds.items()
        if kind == "call" and carries_gradient(node.meta["val"])
    }
    constants: set[Node] = set()
    linears: set[Node] = set()
    for node in forward:
        parents = node.all_input_nodes
        if all(parent in constants for parent in parents):
            constants.add(node)
        # A transposed or cast weight counts as the weight.
        passes_on = is_view(node) or is_copy(node) or placements_of(node) is not None
        if passes_on and node.args[0] in from_params:
            from_params.add(node)
        if any(factor in from_params for factor in matmul_factors(node) or ()):
            linears.add(node)
        if node in linears or any(parent in activations for parent in parents):
            activations.add(node)
    core, contexts = _cores(forward, linears, activations)
    sets = (constants, from_params, linears, core, contexts)
    return ForwardFacts(*map(frozenset, sets))


def _cores(
    forward: Sequence[Node], linears: set[Node], activations: set[Node]
) -> tuple[set[Node], set[Node]]:
    """The attention cores and the matmuls that end them."""
    inside: set[Node] = set()
    contexts: set[Node] = set()
    for node in forward:
        # A matmul with a weight is not part of a core, and what follows does not descend from one.
        if node in linears:
            continue
        factors = matmul_factors(node)
        descends = any(parent in inside for parent in node.all_input_nodes)
        is_joined = node.meta.get("chunk") == "joined"
        if (factors and descends) or (is_joined and contexts.issuperset(node.all_input_nodes)):
            contexts.add(node)
        elif descends or (factors and all(factor in activations for factor in factors)):
            inside.add(node)
    # Descendants of scores that no context needs (a loss on the scores) are not part of the core.
    return inside & ancestors(contexts), contexts
