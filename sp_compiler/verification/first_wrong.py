"""Search for the first operator of a sharded block that computes a wrong result.

A report names the worst output or gradient of a block, to which an error has propagated. The error
starts at the first value that differs, in the order of computation: forward, then gradients from
the last value to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.base.placement import Placement
from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.ir.fx import placements_of
from sp_compiler.ir.program import Region
from sp_compiler.verification.report import output_errors

Values = Mapping[str, Any]
"""Results of the nodes of a graph, by name."""
Joined = Callable[[Tensor, Placement, Tensor], Tensor]
"""Function of the ranks' parts, their placement and the true value, which returns the full value in
the shape of the true one."""


def first_wrong(
    sharded: Region, actual: Values, expected: Values, tolerance: float, joined: Joined
) -> Node | None:
    """Return the first node of ``sharded`` whose value differs from its unsharded counterpart.

    Args:
        sharded: a region after sharding; ``meta["source"]`` of a node is its unsharded node.
        actual: values on simulated ranks.
        expected: values of the unsharded graph.
        tolerance: relative error above which a value is wrong.
        joined: see :data:`Joined`.
    """
    for name, node in _computed_by(sharded).items():
        placement = node.meta.get("placement")
        if differs(placement, actual.get(node.name), expected.get(name), tolerance, joined):
            return node
    return None


def _computed_by(sharded: Region) -> dict[str, Node]:
    """Return the node with the value of each unsharded node, by the latter's name."""
    nodes = {}
    for node in sharded.module.graph.nodes:
        # If an operator became several (a lookup in a part of a table), the last has its value. A
        # conversion has that value too, with the placement that another user needs.
        if node.op == "call_function" and placements_of(node) is None:
            nodes[str(node.meta.get("source", node.name))] = node
    return nodes


def first_wrong_gradient(
    sharded: Region, actual: Values, expected: Values, tolerance: float, joined: Joined
) -> Node | None:
    """Return the first node, in the order of backward, that gives an operand a wrong gradient.

    Args:
        sharded, tolerance, joined: as for :func:`first_wrong`.
        actual: gradients, on simulated ranks.
        expected: gradients of the unsharded graph.
    """
    inputs = {node.name: node for node in sharded.placeholders}
    for name, node in reversed({**inputs, **_computed_by(sharded)}.items()):
        placement = node.meta.get("placement")
        # The gradient of a replicated value is a partial sum, and vice versa.
        dual = placement.dual if isinstance(placement, Placement) else None
        if differs(dual, actual.get(node.name), expected.get(name), tolerance, joined):
            # Its gradient is computed by its users; the first of them ran last in backward.
            readers = [user for user in node.users if user.op == "call_function"]
            return readers[0] if readers else node
    return None


def differs(placement: Any, value: Any, true: Any, tolerance: float, joined: Joined) -> bool:
    """Return whether the ranks' parts ``value`` are known and differ from those of ``true``."""
    known = isinstance(value, Tensor) and isinstance(true, Tensor)
    if not known or not isinstance(placement, Placement):
        return False
    try:
        full = joined(value, placement, true)
    except RankMismatchError:
        return True
    except RuntimeError:  # padded, or in a form that is converted back only for outputs
        return False
    return output_errors([full], [true])["output 0"] > tolerance


def operator_text(node: Node) -> str:
    """Return the operator of ``node`` for a report, with its module and line in the user's
    model."""
    target = getattr(node.target, "__name__", str(node.target))
    where = module_path(node) or "(model)"
    return ", ".join(part for part in (f"{target} of {where}", source_line(node)) if part)


def gradients_of(
    values: Values, outputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the gradient of every value, by its name, from the ``tangents`` of ``outputs``."""
    wanted = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.requires_grad
    }
    pairs = [
        (value, tangent)
        for value, tangent in zip(outputs, tangents, strict=True)
        if value.requires_grad
    ]
    if not pairs or not wanted:
        return {}
    grads = torch.autograd.grad(
        [value for value, _ in pairs],
        list(wanted.values()),
        [tangent for _, tangent in pairs],
        allow_unused=True,
    )
    return dict(zip(wanted, grads, strict=True))
