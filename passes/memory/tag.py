"""Decide what is saved for backward: write a tag on every forward node and change nothing else.

``meta["recompute"]`` is ``"save"`` (saved if backward needs it) or ``"recompute"`` (recomputed from
what is saved); ``meta["recompute_reason"]`` is the reason in a few words. The partitioner acts on
the tags. Under a budget, ``"offload"`` saves a value in the host's memory, and inputs of the region
may have this tag too.

Under every policy, views, gathered values, shards of whole values, constants, casts of parameters
and identity conversions are recomputed, results of operators that communicate internally are saved,
and values in chunks are tagged as :mod:`sp_compiler.passes.chunks.chunk` says. The rest is decided
by one of :mod:`sp_compiler.passes.memory.policies`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from torch.fx import Node

from sp_compiler.base.errors import ArgumentError, PassError, expected_one_of
from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.op_traits import (
    collective_of,
    conversion_of,
    has_inner_communication,
    is_identity,
    is_part,
    is_view,
)
from sp_compiler.passes.memory import policies
from sp_compiler.passes.memory.forward_facts import ForwardFacts, forward_facts
from sp_compiler.passes.memory.recompute_policy import RecomputePolicy, Tag
from sp_compiler.trace.joint import JointGraph

# Discovered, not listed, so that a new policy is one file.
_FOUND: dict[str, RecomputePolicy] = {
    name: importlib.import_module(f"{policies.__name__}.{name}").POLICY
    for _, name, _ in pkgutil.iter_modules(policies.__path__)
}
POLICIES: Mapping[str, RecomputePolicy] = dict(
    sorted(_FOUND.items(), key=lambda item: (-item[1].saved_sbh, item[0]))
)
"""By name, from the one that saves most to the one that saves least."""


_CHUNKS: Mapping[str, Tag] = {
    "part": ("recompute", "one chunk of rows at a time"),
    "joined": ("save", "of all chunks of rows"),
}
"""By the value that :mod:`sp_compiler.passes.chunks.chunk` writes to ``meta["chunk"]``."""


def tag_recompute(joint: JointGraph, policy: str) -> None:
    """Tag every forward node of ``joint`` for the policy of this name.

    Raises:
        ArgumentError: a policy that does not exist.
        PassError: one that raises, or returns something other than a tag.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"recompute={policy!r}: {expected_one_of(policy, POLICIES)}")
    facts = forward_facts(joint)
    backward = joint.backward_nodes()
    for node in joint.graph.nodes:
        if node.op != "call_function" or node in backward:
            node.meta.pop("recompute", None)  # left by another setting
            continue
        if is_part(node):  # of several results; it gets the tag of its operator
            source = node.args[0].meta
            tag = source["recompute"], source["recompute_reason"]
        else:
            tag = _always(node, facts) or _decided(node, facts, policy, joint.region)
        node.meta["recompute"], node.meta["recompute_reason"] = tag


def _decided(node: Node, facts: ForwardFacts, policy: str, region: str) -> Tag:
    """The tag that ``policy``, which may be a file of the user's, gives a node of ``region``."""
    subject = f"recompute policy {policy!r}, asked for an operator of region {region!r},"
    try:
        tag = POLICIES[policy].decide(node, facts)
    except Exception as error:
        message = f"{subject} raised {type(error).__name__}: {error}"
        raise PassError(Pass.TAG, message, node) from error
    # The partitioner would take any other word for "recompute".
    if not isinstance(tag, tuple) or len(tag) != 2 or tag[0] not in ("save", "recompute"):
        message = f'{subject} returned {tag!r}; expected ("save" or "recompute", the reason)'
        raise PassError(Pass.TAG, message, node)
    return tag


def tags_of(joint: JointGraph) -> dict[Node, Tag]:
    """The tags that the nodes of ``joint`` have."""
    return {
        node: (node.meta["recompute"], node.meta["recompute_reason"])
        for node in joint.graph.nodes
        if "recompute" in node.meta
    }


def write_tags(joint: JointGraph, tags: Mapping[Node, Tag]) -> None:
    """Put ``tags`` on the nodes of ``joint``, and remove all others."""
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
    for node, tag in tags.items():
        node.meta["recompute"], node.meta["recompute_reason"] = tag


def _always(node: Node, facts: ForwardFacts) -> Tag | None:
    """Return the tag of a node that is the same under every policy."""
    # In this order: a constant costs nothing to make again, whatever operator makes it.
    if node in facts.constants:
        return "recompute", "constant"
    if has_inner_communication(node):
        return "save", "its collectives are not repeated"
    # A policy treats the joined context of all chunks like that of unchunked attention.
    if "chunk" in node.meta and not (node.meta["chunk"] == "joined" and node in facts.contexts):
        return _CHUNKS[node.meta["chunk"]]
    if is_identity(node):
        return "recompute", "the same tensor under another placement"
    if collective_of(node) == "all_gather":
        return "recompute", "gathered again from the kept shard"
    conversion = conversion_of(node)
    if (conversion is not None and conversion.method == "shard") or is_view(node):
        return "recompute", "view of a kept tensor"
    return ("recompute", "cast of a parameter") if node in facts.from_params else None
