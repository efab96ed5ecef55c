"""Reasons why an operator cannot take a sharded operand, in words."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.passes.sharding.dim_roles import Value, value_of
from sp_compiler.rules.factors import OpRule
from sp_compiler.rules.table import missing_rule, rule_for
from sp_compiler.rules.vocabulary import has_vocabulary, vocabulary_obstacle


def operator_text(node: Node) -> str:
    """Return text such as ``aten.linear in layers.0.mlp.up (model.py:12 x = self.up(x))``."""
    where = module_path(node)
    line = source_line(node)
    return f"{node.target}{f' in {where}' if where else ''}{f' ({line})' if line else ''}"


def why_no_rule(node: Node, name: str) -> str:
    """Explain why ``node``, called ``name`` in the text, has no rule to be placed by."""
    # The table has one, so it was disabled: the check refused the sharded operator.
    if rule_for(node) is not None:
        return f"the sharding of {name} could not be proven correct"
    return f"there is {missing_rule(node, name)}"


def why_replicated(node: Node, rule: OpRule | None, value: Value, dim: int, world_size: int) -> str:
    """Explain why ``node`` does not take its operand ``value`` sharded on ``dim``."""
    if rule is None and has_vocabulary(node):
        obstacle = vocabulary_obstacle(node) or f"it is not sharded on dim {dim}"
        return f"{operator_text(node)} runs replicated: {obstacle}"
    if rule is None:
        return why_no_rule(node, operator_text(node))
    operands = [value_of(operand) for operand in tensor_operands(node)]
    factors = rule.operands[operands.index(value)][dim]
    if not factors:
        return f"{operator_text(node)} has dim {dim} of size 1"
    if any(factor.blocked for factor in factors):
        return f"{operator_text(node)} needs dim {dim} in full on every rank"
    # In a fused dim only the outermost factor counts: an inner one is sharded only where a later
    # operator cuts the dim there, which is not a property of this operator.
    outer = factors[0].size
    if outer % world_size:
        sizes = " x ".join(str(factor.size) for factor in factors)
        why = f"has {sizes} along dim {dim}, and {outer} is not divisible by {world_size}"
        return f"{operator_text(node)} {why}"
    return f"{operator_text(node)} has no way to run with dim {dim} sharded"
