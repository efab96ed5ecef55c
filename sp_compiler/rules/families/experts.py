"""Rules of rows that are sent to the ranks of their experts."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.rules.factors import Factor, OpRule, private
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    operand_shapes,
    result_shapes,
    rule,
)


@rule("sp_compiler::expert_routes", "sp_compiler::expert_routes_by_id")
def _routes(node: Node) -> OpRule:
    """The destination of a row depends on all rows."""
    operands = [private(shape, f"o{index}_") for index, shape in enumerate(operand_shapes(node))]
    results = [private(shape, f"r{index}_") for index, shape in enumerate(result_shapes(node))]
    return OpRule(tuple(operands), tuple(results), rows="fixed")


@rule("sp_compiler::expert_dispatch", "sp_compiler::expert_combine")
def _rows(node: Node) -> OpRule:
    """The features of the rows may be sharded, but not the rows."""
    shape, *route = operand_shapes(node)
    (result,) = result_shapes(node)
    rest = tuple(
        () if size == 1 else (Factor(f"d{dim}", size),) for dim, size in enumerate(shape[1:], 1)
    )
    rows, made = private(shape[:1], "s"), private(result[:1], "c")
    others = [private(each, f"o{index}_") for index, each in enumerate(route)]
    operands = ((*rows, *rest), *others)
    return OpRule(operands, ((*made, *rest),), linear=FIRST_OPERAND, rows="fixed", segmented=False)
