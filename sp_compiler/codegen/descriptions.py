"""Descriptions of values in comments of generated code."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.codegen.expressions import Printer

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def describe(node: Node, printer: Printer) -> str:
    """Return shape, dtype and placement of a value: ``"(64, 32) f32 S(0)"``."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return "size of an input"  # a number that differs between calls
    if not isinstance(value, torch.Tensor):
        return ""
    placement = node.meta.get("placement")
    sizes = ", ".join(map(printer.value, value.shape))
    # As Python writes a tuple of one, for who pastes it.
    sizes = f"({sizes},)" if value.dim() == 1 else f"({sizes})"
    return f"{sizes} {short_dtype(value.dtype)}" + (f" {placement}" if placement else "")


def short_dtype(dtype: torch.dtype) -> str:
    """``"bf16"`` for ``torch.bfloat16``."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
