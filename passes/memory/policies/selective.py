"""Save costly results; recompute row-wise and elementwise functions of them."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.ir.op_traits import FUSED_ATTENTION, collective_of, is_dropout_mask
from sp_compiler.passes.memory.forward_facts import ForwardFacts
from sp_compiler.passes.memory.recompute_policy import RecomputePolicy, Tag


def decide(node: Node, facts: ForwardFacts) -> Tag:
    """Save results of linears, convolutions, reductions over ranks and attention, and stored
    masks."""
    if node in facts.core:
        return "recompute", "attention core"
    if node in facts.linears:
        is_convolution = node.target is torch.ops.aten.convolution.default
        return "save", f"result of a {'convolution' if is_convolution else 'linear'}"
    # If recomputed, it would be communicated twice.
    if collective_of(node) in ("reduce_scatter", "all_reduce"):
        return "save", "result of a reduction over ranks"
    if node in facts.contexts or node.target in FUSED_ATTENTION or facts.copies_context(node):
        return "save", "result of attention"
    if is_dropout_mask(node):
        return "save", "stored dropout mask"
    return "recompute", "row-wise or elementwise of kept tensors"


POLICY = RecomputePolicy(decide, saved_sbh=20)
