"""Save only the inputs of the region."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.passes.memory.forward_facts import ForwardFacts
from sp_compiler.passes.memory.recompute_policy import RecomputePolicy, Tag


def decide(node: Node, facts: ForwardFacts) -> Tag:
    """Recompute every node."""
    return "recompute", "only the inputs of the region are kept"


# The last region has nothing to gain: its backward starts where its forward ends, and saved tensors
# live no longer than recomputed ones would.
POLICY = RecomputePolicy(decide, saved_sbh=2, last_region="selective")
