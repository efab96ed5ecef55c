"""Remove a float64 model's own rounding to float32 from a captured graph.

Models of transformers compute their loss in float32 regardless of their dtype, so a comparison in
float64 would not see errors below the rounding of float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from sp_compiler.ir.captured import Captured
from sp_compiler.ir.rewriting import set_value

_LOWER = (torch.float32, torch.bfloat16, torch.float16)


def lift_casts_to_float64(captured: Captured) -> None:
    """Turn every lower floating dtype in the graph into float64, in place.

    ``to(x, float32)`` -> ``to(x, float64)``, ``softmax(x, dtype=float32)`` -> ``float64``, and so
    for factories; constants of lower precision get float64 values. Nothing happens if no parameter
    is float64. The fake values of calls are outdated afterwards.
    """
    placeholders = list(zip(captured.placeholders, captured.refs, strict=True))
    if not any(
        ref.kind == "param" and node.meta["val"].dtype is torch.float64
        for node, ref in placeholders
    ):
        return
    for node, ref in placeholders:
        if ref.kind == "constant" and captured.constants[ref.name].dtype in _LOWER:
            captured.constants[ref.name] = captured.constants[ref.name].double()
            set_value(node, node.meta["val"].double())
    # All of them, whatever their purpose: a comparison at 1e-10 cannot tolerate any.
    for node in captured.module.graph.nodes:
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, _lifted)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _lifted)


def _lifted(argument: Any) -> Any:
    if isinstance(argument, Node):
        return argument
    return torch.float64 if argument in _LOWER else argument
