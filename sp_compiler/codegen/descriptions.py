"""Descriptions of values in comments of generated code."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.codegen.expressions import Printer
from sp_compiler.ir.text import render_dtype


def describe(node: Node, printer: Printer) -> str:
    """Return shape, dtype and placement of a value: ``"(64, 32) f32 S(0)"``."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return "size of an input"  # a number that differs between calls
    if not isinstance(value, torch.Tensor):
        return ""
    placement = node.meta.get("placement")
    sizes = ", ".join(map(printer.value, value.shape))
    # Like a Python tuple of one, so that it can be pasted.
    sizes = f"({sizes},)" if value.dim() == 1 else f"({sizes})"
    return f"{sizes} {render_dtype(value.dtype)}" + (f" {placement}" if placement else "")
