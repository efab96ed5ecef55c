"""What is kept for backward: writes a tag on every forward node and changes nothing else.

``meta["recompute"]`` is ``"save"`` (kept if backward needs it) or ``"recompute"`` (computed again
from what is kept); ``meta["recompute_reason"]`` says why in a few words. The partitioner acts on
the tags.

Whatever the policy, views, gathered values, constants, casts of parameters and identity conversions
are recomputed, and an operator that communicates inside is kept. Then, in units of s*b*h bytes of a
GPT block in 16 bit (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models"), with masks stored / regenerated:

===============  ==========================================================  ==============
policy           kept                                                        bytes
===============  ==========================================================  ==============
``"none"``       all that backward uses                                      34+5as/h, 32+4as/h
``"attention"``  the same without the attention core                         34, 32
``"selective"``  results of linears, reductions, attention; stored masks     22, 20
``"full"``       the inputs of the region                                    2
===============  ==========================================================  ==============

Row statistics (mean and rstd of a norm) belong to their norm: kept where its result is, else they
come with the recomputed norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.fx import Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.ir.fx import carries_gradient, placements_of
from sp_compiler.ir.op_traits import (
    FUSED_ATTENTION,
    NARROWING_VIEWS,
    base,
    collective_of,
    conversion_of,
    has_inner_communication,
    is_cast,
    is_copy,
    is_dropout_mask,
    is_identity,
    is_part,
    is_view,
    matmul_factors,
    view_chain,
)
from sp_compiler.trace.joint import JointGraph, ancestors

Policy = Literal["none", "attention", "selective", "full"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Tag = tuple[Literal["save", "recompute"], str]

_EXPANDS = (torch.ops.aten.expand.default,)


def tag_recompute(joint: JointGraph, policy: Policy) -> None:
    """Tag every forward node of ``joint`` for ``policy``.

    Raises:
        ArgumentError: a policy that does not exist.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"recompute={policy!r}: expected one of {', '.join(POLICIES)}")
    facts = attention_facts(joint)
    backward = joint.backward_nodes()
    decide = _DECIDE[policy]
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in backward:
            tag = _part_of_result(node) or _always(node, facts) or decide(node, facts)
            node.meta["recompute"], node.meta["recompute_reason"] = tag


@dataclass(frozen=True)
class AttentionFacts:
    """What the forward nodes are to the policies.

    Attributes:
        constants: what no input of the region goes into.
        from_params: parameters, buffers and constants seen through views, casts and conversions.
        linears: matrix products with such a factor.
        core: from the product of two activations (the scores) up to the product that uses it.
        contexts: products of what comes from a score product with an activation.
    """

    constants: frozenset[Node]
    from_params: frozenset[Node]
    linears: frozenset[Node]
    core: frozenset[Node]
    contexts: frozenset[Node]


def attention_facts(joint: JointGraph) -> AttentionFacts:
    """Find linears and attention cores of the forward by how values flow."""
    backward = joint.backward_nodes()
    forward = [
        node for node in joint.graph.nodes if node.op == "call_function" and node not in backward
    ]
    from_params = _from_params(joint, forward)
    linears = {
        node
        for node in forward
        if (factors := matmul_factors(node)) and any(factor in from_params for factor in factors)
    }
    activations = _activations(joint, forward, linears)
    core, contexts = _cores(forward, linears, activations)
    sets = (_constants(forward), from_params, linears, core, contexts)
    return AttentionFacts(*map(frozenset, sets))


def _constants(forward: list[Node]) -> set[Node]:
    known: set[Node] = set()
    for node in forward:
        if all(parent in known for parent in node.all_input_nodes):
            known.add(node)
    return known


def _from_params(joint: JointGraph, forward: list[Node]) -> set[Node]:
    kinds = zip(joint.inputs, joint.input_kinds, strict=True)
    known = {node for node, kind in kinds if kind in ("param", "buffer", "constant")}
    for node in forward:
        passes_on = is_view(node) or is_copy(node) or placements_of(node) is not None
        if passes_on and node.args[0] in known:
            known.add(node)
    return known


def _activations(joint: JointGraph, forward: list[Node], linears: set[Node]) -> set[Node]:
    """What descends from a linear or from a differentiable value of another region."""
    known = {
        node
        for node, kind in zip(joint.inputs, joint.input_kinds, strict=True)
        if kind == "call" and carries_gradient(node.meta["val"])
    }
    for node in forward:
        if node in linears or any(parent in known for parent in node.all_input_nodes):
            known.add(node)
    return known


def _cores(
    forward: list[Node], linears: set[Node], activations: set[Node]
) -> tuple[set[Node], set[Node]]:
    inside: set[Node] = set()
    contexts: set[Node] = set()
    for node in forward:
        if node in linears:
            continue
        factors = matmul_factors(node)
        descends = any(parent in inside for parent in node.all_input_nodes)
        if factors and descends:
            contexts.add(node)
        elif descends or (factors and all(factor in activations for factor in factors)):
            inside.add(node)
    used = ancestors(sorted(contexts, key=forward.index))
    return {node for node in inside if node in used}, contexts


def _part_of_result(node: Node) -> Tag | None:
    """A part of an operator's several results goes where the operator goes."""
    if is_part(node):
        return node.args[0].meta["recompute"], node.args[0].meta["recompute_reason"]
    return None


def _always(node: Node, facts: AttentionFacts) -> Tag | None:
    if node in facts.constants:
        return "recompute", "constant"
    if has_inner_communication(node):
        return "save", "its collectives are not repeated"
    if is_identity(node):
        return "recompute", "the same tensor under another placement"
    if collective_of(node) == "all_gather":
        return "recompute", "gathered again from the kept shard"
    conversion = conversion_of(node)
    if (conversion is not None and conversion.method == "shard") or is_view(node):
        return "recompute", "view of a kept tensor"
    if node in facts.from_params:
        return "recompute", "cast of a parameter"
    return None


def _none(node: Node, facts: AttentionFacts) -> Tag:
    if is_copy(node) and _expands(node):
        return "recompute", "expanded copy of a kept tensor"
    if is_cast(node) and _widens(node):
        return "recompute", "wider cast of a kept tensor"
    return "save", "used by backward"


def _attention(node: Node, facts: AttentionFacts) -> Tag:
    if node in facts.core:
        return "recompute", "attention core"
    return _none(node, facts)


def _selective(node: Node, facts: AttentionFacts) -> Tag:
    if node in facts.core:
        return "recompute", "attention core"
    if node in facts.linears:
        return "save", "result of a linear"
    if collective_of(node) in ("reduce_scatter", "all_reduce"):
        return "save", "result of a reduction over ranks"
    if node in facts.contexts or node.target in FUSED_ATTENTION or _copies_context(node, facts):
        return "save", "result of attention"
    if is_dropout_mask(node):
        return "save", "stored dropout mask"
    return "recompute", "row-wise or elementwise of kept tensors"


def _full(node: Node, facts: AttentionFacts) -> Tag:
    return "recompute", "only the inputs of the region are kept"


def _copies_context(node: Node, facts: AttentionFacts) -> bool:
    """The merged heads: a whole copy of the context that costs no more to keep than the context."""
    return (
        is_copy(node)
        and not is_cast(node)
        and base(node.args[0]) in facts.contexts
        and all(view.target not in NARROWING_VIEWS for view in view_chain(node.args[0]))
        and not _expands(node)
    )


def _expands(copy: Node) -> bool:
    return any(view.target in _EXPANDS for view in view_chain(copy.args[0]))


def _widens(cast: Node) -> bool:
    return cast.meta["val"].dtype.itemsize >= cast.args[0].meta["val"].dtype.itemsize


_DECIDE: dict[str, Callable[[Node, AttentionFacts], Tag]] = {
    "none": _none,
    "attention": _attention,
    "selective": _selective,
    "full": _full,
}
