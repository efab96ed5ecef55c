"""Recompute the attention core, as Korthikanti et al. 2022 do; save the rest."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.passes.memory.forward_facts import ForwardFacts
from sp_compiler.passes.memory.policies import none
from sp_compiler.passes.memory.recompute_policy import RecomputePolicy, Tag

_CORE = "attention core"


def decide(node: Node, facts: ForwardFacts) -> Tag:
    """Recompute the scores, the softmax and everything between, up to the context."""
    # Before the other policy, which would save the scores: backward of softmax and matmuls reads
    # them.
    if node in facts.core:
        return "recompute", _CORE
    return none.decide(node, facts)


POLICY = RecomputePolicy(decide, saved_sbh=32, seeks=_CORE)
