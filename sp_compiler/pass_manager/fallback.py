"""Fallback: an operator whose placement the check rejects runs replicated, slower but never
wrong."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.ir.fx import operands, reach
from sp_compiler.ir.program import Program


def refused_operator(
    program: Program, error: PlacementError, replicated: Collection[tuple[str, str]]
) -> Node | None:
    """Return the operator of the unsharded program from which a rejected node came.

    If there is none, as for the sum of two gradients, or it is already ``replicated``, return the
    nearest one from which the node's operands came.
    """
    known = {
        node.name: node
        for region in program.regions
        for node in region.module.graph.nodes
        if region.name == error.region and node.op == "call_function"
    }
    # Breadth first, so that the operator found is the nearest, and as little of the model as
    # possible runs replicated.
    for node in reach([error.node] if error.node is not None else [], operands):
        # Sharding rewrites a copy: the two programs have no nodes in common, only their
        # origins.
        name = node.meta.get("root", node.meta.get("source"))
        if name in known and (error.region, name) not in replicated:
            return known[name]
    return None


def fallback_note(operator: Node, error: PlacementError) -> str:
    """Return the plan's note about an operator that runs replicated."""
    return (
        f"{operator.target} runs replicated: its sharding could not be "
        f"proven correct ({module_path(operator) or '(model)'}, {source_line(operator)}): "
        f"{str(error).splitlines()[0]}"
    )
