"""Save everything that backward uses."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.ir.op_traits import is_cast, is_copy
from sp_compiler.passes.memory.forward_facts import ForwardFacts, expands
from sp_compiler.passes.memory.recompute_policy import RecomputePolicy, Tag


def decide(node: Node, facts: ForwardFacts) -> Tag:
    """Recompute only copies that are larger than their operands."""
    # Even here: backward can read the same from the operand of such a node, for less memory.
    if is_copy(node) and expands(node):
        return "recompute", "expanded copy of a kept tensor"
    if is_cast(node):
        cast, source = (each.meta["val"].dtype.itemsize for each in (node, node.args[0]))
        if cast >= source:
            return "recompute", "wider cast of a kept tensor"
    return "save", "used by backward"


# The attention core is 4as/h: 64 for the 96 heads, 2048 tokens and hidden size 12288 of GPT-3.
POLICY = RecomputePolicy(decide, saved_sbh=32 + 64, chunks_rows=False)
