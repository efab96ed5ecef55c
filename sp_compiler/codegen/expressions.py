"""One FX node as a Python expression, the way a person would write it.

Plain ``torch`` functions and tensor methods are used where they are the same operator, because
they cost half of what calling an ``OpOverload`` costs; all else calls the overload, bound once per
module under a name that starts with ``aten_``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.errors import PassError
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.op_traits import conversion_of, is_started
from sp_compiler.ir.symbolic import SYMBOLIC, hint, is_open, plain, text
from sp_compiler.ops.convert import CONVERSIONS
from sp_compiler.ops.registry import operator_of

aten = torch.ops.aten

INFIX = {
    aten.add.Tensor: "+",
    aten.add.Scalar: "+",
    aten.sub.Tensor: "-",
    aten.sub.Scalar: "-",
    aten.mul.Tensor: "*",
    aten.mul.Scalar: "*",
    aten.div.Tensor: "/",
    aten.div.Scalar: "/",
    aten.eq.Tensor: "==",
    aten.eq.Scalar: "==",
    aten.lt.Tensor: "<",
    aten.lt.Scalar: "<",
    aten.le.Tensor: "<=",
    aten.le.Scalar: "<=",
    aten.gt.Tensor: ">",
    aten.gt.Scalar: ">",
    aten.ge.Tensor: ">=",
    aten.ge.Scalar: ">=",
}
METHODS = {
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.expand.default: "expand",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.select.int: "select",
    aten.split.Tensor: "split",
    aten.split_with_sizes.default: "split",
    aten.unbind.int: "unbind",
    aten.neg.default: "neg",
    aten.exp.default: "exp",
    aten.masked_fill.Scalar: "masked_fill",
    aten.masked_fill.Tensor: "masked_fill",
}
FUNCTIONS = {
    **{
        overload: f"torch.{overload.__name__.partition('.')[0]}"
        for overload in (
            aten._log_softmax.default,
            aten._log_softmax_backward_data.default,
            aten._softmax.default,
            aten._softmax_backward_data.default,
            aten.addmm.default,
            aten.baddbmm.default,
            aten.bmm.default,
            aten.cat.default,
            aten.cos.default,
            aten.embedding.default,
            aten.full.default,
            aten.mean.dim,
            aten.mm.default,
            aten.native_layer_norm.default,
            aten.pow.Tensor_Scalar,
            aten.relu.default,
            aten.rsqrt.default,
            aten.sigmoid.default,
            aten.sin.default,
            aten.stack.default,
            aten.sum.dim_IntList,
            aten.tanh.default,
            aten.where.self,
        )
    },
    aten.gelu.default: "F.gelu",
    aten.linear.default: "F.linear",
}
_DROPPED = {"layout": torch.strided, "pin_memory": False}


class Printer:
    """Prints nodes; remembers which overloads the module has to bind.

    Devices are printed as the name ``device``.

    Args:
        sizes: names of the symbols of open sizes.

    Attributes:
        bindings: module-level name to what it is bound to.
    """

    def __init__(self, sizes: Mapping[Any, str] | None = None) -> None:
        self.bindings: dict[str, str] = {}
        self._sizes = sizes or {}

    def expression(self, node: Node) -> str:
        """``node`` as an expression of the names of its arguments.

        Raises:
            PassError: a conversion that no operation implements.
        """
        special = _SPECIAL.get(node.target)
        if special is not None:
            return special(self, node)
        if getattr(node.target, "namespace", "") == "sp_compiler":
            return self._communicator_call(node)
        if node.target in INFIX and not node.kwargs and len(node.args) == 2:
            return f" {INFIX[node.target]} ".join(map(self._operand, node.args))
        if node.target in METHODS:
            return f"{node.args[0]}.{METHODS[node.target]}({self._arguments(node, 1)})"
        return f"{self._function(node)}({self._arguments(node)})"

    def _function(self, node: Node) -> str:
        name = node.target.__name__  # "sum.dim_IntList"
        if node.target in FUNCTIONS:
            return FUNCTIONS[node.target]
        op, _, overload = name.partition(".")
        bound = f"{node.target.namespace}_{op}" + (f"_{overload}" if overload != "default" else "")
        self.bindings[bound] = f"torch.ops.{node.target}"
        return bound

    def _arguments(self, node: Node, start: int = 0) -> str:
        parts = [self.value(arg) for arg in node.args[start:]]
        for key, arg in node.kwargs.items():
            if key in _DROPPED and arg in (_DROPPED[key], None):
                continue
            if key == "device" and arg is not None:
                parts.append("device=device")
            else:
                parts.append(f"{key}={self.value(arg)}")
        return ", ".join(parts)

    def value(self, value: Any) -> str:
        """An argument as source text."""
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value := plain(value), SYMBOLIC):
            return text(value, self._sizes)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return str(value) if isinstance(value, Node) else repr(value)

    def _operand(self, value: Any) -> str:
        text = self.value(value)
        return f"({text})" if is_open(value) and not text.isidentifier() else text

    def _communicator_call(self, node: Node) -> str:
        ours = operator_of(node.target)
        assert ours is not None
        args = ", ".join(map(self.value, ours.method_arguments(node.args)))
        return f"tp.{ours.name}({args})"

    def _convert(self, node: Node) -> str:
        x, source, target, _ = node.args
        conversion = conversion_of(node)
        if conversion is None:
            known = ", ".join(f"{a} -> {b}" for a, b in CONVERSIONS)
            message = f"no conversion {source} -> {target}; have {known}"
            raise PassError("codegen", message, node)
        method = f"start_{conversion.method}" if is_started(node) else conversion.method
        return f'tp.{method}({x}, src="{source}", dst="{target}")' if method else str(x)

    def _wait(self, node: Node) -> str:
        return f"{node.args[0]}.wait()"

    def _view(self, node: Node) -> str:
        # reshape, not view: the caller's tensors need not have the strides that were traced.
        sizes = [self.value(size) for size in node.meta["val"].shape]
        if sizes and math.prod(map(hint, node.meta["val"].shape)):
            sizes[0] = "-1"
        return f"{node.args[0]}.reshape({', '.join(sizes) or '()'})"

    def _slice(self, node: Node) -> str:
        call = arguments(node)
        x, dim, step = call["self"], call["dim"], call["step"]
        size = x.meta["val"].shape[dim]
        start, end = call["start"] or 0, call["end"]
        if not any(map(is_open, (start, end, size))):
            start, end, _ = slice(start, end).indices(size)
        if step == 1 and _is_inside(start, end, size):
            return f"{x}.narrow({dim}, {self.value(start)}, {self.value(end - start)})"
        return f"{self._function(node)}({self._arguments(node)})"

    def _clone(self, node: Node) -> str:
        contiguous = node.kwargs.get("memory_format") is torch.contiguous_format
        return f"{node.args[0]}.{'contiguous' if contiguous else 'clone'}()"

    def _cast(self, node: Node) -> str:
        if set(node.kwargs) <= {"dtype", *_DROPPED, "device"} and "dtype" in node.kwargs:
            return f"{node.args[0]}.to({node.kwargs['dtype']})"
        return f"{self._function(node)}({self._arguments(node)})"


def _is_inside(start: Any, end: Any, size: Any) -> bool:
    """Whether ``0 <= start < end <= size`` for sure."""
    if any(map(is_open, (start, end, size))):
        return False
    return bool(start < end)


_SPECIAL: dict[Any, Callable[[Printer, Node], str]] = {
    torch.ops.sp_compiler.convert.default: Printer._convert,
    torch.ops.sp_compiler.wait.default: Printer._wait,
    aten.view.default: Printer._view,
    aten._unsafe_view.default: Printer._view,
    aten.slice.Tensor: Printer._slice,
    aten.clone.default: Printer._clone,
    aten._to_copy.default: Printer._cast,
}


_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def describe(node: Node, printer: Printer | None = None) -> str:
    """Shape, element type and placement of a value: ``"(64, 32) f32 S(0)"``.

    ``printer`` has the names of open sizes.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return "size of an input"
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    placement = node.meta.get("placement")
    shape = tuple(value.shape)
    if any(map(is_open, shape)) and printer is not None:
        inner = ", ".join(map(printer.value, shape))
        sizes = f"({inner},)" if len(shape) == 1 else f"({inner})"
    else:
        sizes = str(shape)
    return f"{sizes} {dtype}" + (f" {placement}" if placement else "")
