"""Print an FX node as the Python expression that a person would write.

Plain ``torch`` functions and tensor methods are used if they are the same operator, because they
cost half as much as calling an ``OpOverload``; otherwise the overload is called, bound once per
module to a name that starts with ``aten_``.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.python_text import identifier, string
from sp_compiler.codegen.idioms import Idioms
from sp_compiler.codegen.spelling import BINDS, FUNCTIONS, INFIX, METHODS
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.op_traits import RESHAPES, conversion_of, is_started, writes
from sp_compiler.ir.symbolic import SYMBOLIC, example_numel, is_open, plain, text
from sp_compiler.ops.convert import CONVERSIONS
from sp_compiler.ops.registry import operator_of

aten = torch.ops.aten

_DROPPED = {"layout": torch.strided, "pin_memory": False}


class Printer:
    """Prints nodes, and records the overloads that the module has to bind.

    Devices are printed as the name ``device``.

    Args:
        names: names of the nodes of one graph.
        sizes: names of the symbols of open sizes.
        bindings: module-level name to its value; new ones are added.

    Attributes:
        nested: nodes that are printed inside the expression that uses them.
        idioms: groups of nodes that are printed as one call.
    """

    def __init__(
        self,
        names: Mapping[Node, str],
        idioms: Idioms,
        sizes: Mapping[Any, str],
        bindings: dict[str, str],
    ) -> None:
        self.names = names
        self.idioms = idioms
        self.nested: Collection[Node] = ()
        self.sizes = sizes
        self._bindings = bindings

    def expression(self, node: Node) -> str:
        """Return ``node`` as an expression of names and nested nodes.

        Raises:
            PassError: a conversion without an implementation.
        """
        # First, because the view that ends an idiom also has a spelling of its own.
        if match := self.idioms.matmuls.get(node):
            return f"torch.matmul({self.value(match.left)}, {self.value(match.right)})"
        special = _SPECIAL.get(node.target)
        if special is not None:
            return special(self, node)
        if getattr(node.target, "namespace", "") == "sp_compiler":
            ours = operator_of(node.target)
            assert ours is not None
            args = ", ".join(map(self.value, ours.method_arguments(node.args)))
            return f"tp.{ours.name}({args})"
        if _is_infix(node):
            symbol, (left, right) = INFIX[node.target], node.args
            return f"{self._operand(left, node)} {symbol} {self._operand(right, node, right=True)}"
        # Methods are in C; the call of an overload goes through Python first.
        if node.target in METHODS:
            name = METHODS[node.target]
            return f"{self._receiver(node.args[0])}.{name}({self._arguments(node, 1)})"
        return f"{self._function(node)}({self._arguments(node)})"

    def value(self, value: Any) -> str:
        """Return an argument as source text.

        Raises:
            PassError: a constant that has no text.
        """
        if isinstance(value, Node):
            return self.expression(value) if value in self.nested else self.names[value]
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value := plain(value), SYMBOLIC):
            return text(value, self.sizes)
        if isinstance(value, torch.device):  # that of the inputs, wherever they are at run time
            return "device"
        return literal(value)

    def _receiver(self, value: Any) -> str:
        """Text of an object whose method is called."""
        text, printed = self.value(value), self._printed(value)
        return f"({text})" if printed in self.nested and _is_infix(printed) else text

    def _printed(self, value: Any) -> Any:
        """The node whose text represents ``value``: a conversion without communication has none."""
        while value in self.nested:
            conversion = conversion_of(value)
            if conversion is None or conversion.method:
                break
            value = value.args[0]
        return value

    def _operand(self, value: Any, user: Node, *, right: bool = False) -> str:
        text = self.value(value)
        if not isinstance(value, Node):
            return f"({text})" if is_open(value) and not text.isidentifier() else text
        value = self._printed(value)
        if value not in self.nested or not _is_infix(value):
            return text
        # The order of evaluation stays that of the graph, because sums and products round.
        inner, outer = BINDS[INFIX[value.target]], BINDS[INFIX[user.target]]
        return text if inner > outer or (inner == outer > 0 and not right) else f"({text})"

    def _function(self, node: Node) -> str:
        if node.target in FUNCTIONS:
            return FUNCTIONS[node.target]
        name = binding(node.target)
        path = "torch.ops"
        for part in (node.target.namespace, *node.target.__name__.split(".")):
            plain_name = part.isascii() and part.isidentifier() and not keyword.iskeyword(part)
            path = f"{path}.{part}" if plain_name else f"getattr({path}, {string(part)})"
        self._bindings[name] = path
        return name

    def _arguments(self, node: Node, start: int = 0) -> str:
        parts = [self.value(arg) for arg in node.args[start:]]
        for key, arg in node.kwargs.items():
            # Traces contain default arguments; a person would not write them.
            if key in _DROPPED and arg in (_DROPPED[key], None):
                continue
            parts.append(f"{key}={self.value(arg)}")
        return ", ".join(parts)

    def _convert(self, node: Node) -> str:
        x, source, target, _ = node.args
        conversion = conversion_of(node)
        if conversion is None:
            known = ", ".join(f"{a} -> {b}" for a, b in CONVERSIONS)
            message = f"no conversion {source} -> {target}; have {known}"
            raise PassError(Pass.CODEGEN, message, node)
        if not conversion.method:
            return self.value(x)
        # Started: overlapped, with its wait further down.
        method = f"start_{conversion.method}" if is_started(node) else conversion.method
        method += "_" * writes(node)
        return f"tp.{method}({self.value(x)}, {literal(source)}, {literal(target)})"

    def _wait(self, node: Node) -> str:
        (started,) = node.all_input_nodes
        return f"{self.names[started]}.wait()"

    def _view(self, node: Node) -> str:
        # reshape, not view: the caller's tensors need not have the strides that were traced.
        sizes = [self.value(size) for size in node.meta["val"].shape]
        # -1 stands for rows of tokens, so that batches of other sizes run too. In a tensor without
        # elements, torch cannot infer it.
        if sizes and example_numel(node.meta["val"]):
            sizes[0] = "-1"
        source = node.args[0]
        # In a chain of reshapes only the last matters; it also makes any copy between them.
        while source in self.nested and source not in self.idioms.matmuls:
            if source.target not in RESHAPES and not is_copied_by(node, source):
                break
            source = source.args[0]
        merged = _merged_dims(source.meta["val"].shape, node.meta["val"].shape)
        call = f"flatten({merged})" if merged else f"reshape({', '.join(sizes) or '()'})"
        return f"{self._receiver(source)}.{call}"

    def _turn(self, node: Node) -> str:
        """A transposition; dims are counted from the front, as in the comment after the line."""
        x, num_dims = node.args[0], node.meta["val"].dim()
        dims = node.args[1] if node.target is aten.permute.default else node.args[1:]
        text = ", ".join(str(dim % num_dims) for dim in dims)
        name = "permute" if node.target is aten.permute.default else "transpose"
        return f"{self._receiver(x)}.{name}({text})"

    def _slice(self, node: Node) -> str:
        call = arguments(node)
        x, dim, step = call["self"], call["dim"], call["step"]
        size = x.meta["val"].shape[dim]
        start, end = call["start"] or 0, call["end"]
        is_known = not any(map(is_open, (start, end, size)))
        if is_known:
            start, end, _ = slice(start, end).indices(size)
        # narrow is a method and a view; a slice in brackets would hide that a dim is cut. A
        # slice that ends before it starts is empty, where narrow raises.
        if step == 1 and is_known and start < end:
            length = self.value(end - start)
            return f"{self._receiver(x)}.narrow({dim}, {self.value(start)}, {length})"
        return f"{self._function(node)}({self._arguments(node)})"

    def _clone(self, node: Node) -> str:
        contiguous = node.kwargs.get("memory_format") is torch.contiguous_format
        return f"{self._receiver(node.args[0])}.{'contiguous' if contiguous else 'clone'}()"

    def _cast(self, node: Node) -> str:
        # Normalization leaves a device only where a value is moved, but the backward has others.
        stays = node.args[0].meta["val"].device == node.meta["val"].device
        options = {"dtype", *_DROPPED, *(["device"] if stays else [])}
        if set(node.kwargs) <= options and "dtype" in node.kwargs:
            return f"{self._receiver(node.args[0])}.to({literal(node.kwargs['dtype'])})"
        return f"{self._function(node)}({self._arguments(node)})"

    def _where(self, node: Node) -> str:
        condition, *branches = node.args
        values = [self._branch(value, node) for value in branches]
        return f"torch.where({', '.join([self.value(condition), *values])})"

    def _branch(self, value: Node, where: Node) -> str:
        """A nested scalar tensor in ``where`` as its number; other values as they are."""
        scalar = value in self.nested and value.target is aten.scalar_tensor.default
        # Two numbers, or one of another dtype, would give the result another dtype.
        both = scalar and where.args[1].target is where.args[2].target
        if not scalar or both or value.meta["val"].dtype != where.meta["val"].dtype:
            return self.value(value)
        return self.value(value.args[0])

    def _layer_norm(self, node: Node) -> str:
        # torch.layer_norm runs the same kernel and drops mean and rstd immediately.
        called = "torch.layer_norm" if first_alone(node) else "torch.native_layer_norm"
        return f"{called}({self._arguments(node)})"

    def _softmax(self, node: Node) -> str:
        x, dim, half_to_float = node.args
        name = node.target.__name__.partition(".")[0]
        if half_to_float:  # torch.softmax requests it with a dtype
            return f"torch.{name}({self._arguments(node)})"
        return f"torch.{name.removeprefix('_')}({self.value(x)}, {dim})"


def _merged_dims(shape: Sequence[Any], merged: Sequence[Any]) -> str:
    """Return the arguments of an equivalent ``flatten``; "" if there is none.

    It names the merged dims instead of sizes that may change with the batch.
    """
    kept = len(merged) - 1
    if not 0 < kept < len(shape) - 1 or any(map(is_open, (*shape, *merged))):
        return ""
    end = len(shape) - kept
    # Sizes are compared too: in a tensor without elements, other dims may have been merged.
    if list(merged) == [math.prod(shape[:end]), *shape[end:]]:
        return f"0, {end - 1}"
    return str(kept) if list(merged) == [*shape[:kept], math.prod(shape[kept:])] else ""


def first_alone(node: Node) -> bool:
    """Return whether only the first result of a norm is used."""
    return node.target is aten.native_layer_norm.default and all(
        user.target is operator.getitem and user.args[1] == 0 for user in node.users
    )


def is_copied_by(reshape: Node, copy: Node) -> bool:
    """Return whether ``reshape`` copies to contiguous memory anyway, so that ``copy`` can go."""
    if copy.target is not aten.clone.default or not copy.kwargs:
        return False
    source, result = copy.args[0].meta["val"], reshape.meta["val"]
    if any(map(is_open, (*source.shape, *source.stride(), *result.shape))):
        return False
    # Torch itself decides: whether a view is possible depends on strides in many ways.
    twin = torch.empty_strided(source.shape, source.stride(), device="meta")
    try:
        twin.view(result.shape)
    except RuntimeError:  # its elements are in another order in memory
        return True
    return False


def literal(value: Any) -> str:
    """Return a constant as a Python expression.

    Raises:
        PassError: the constant has no expression.
    """
    if isinstance(value, str):
        return string(value)
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):  # an IntEnum's own repr is not an expression
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f'float("{float(value)}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    raise PassError(Pass.CODEGEN, f"an argument of type {type(value).__name__} has no text")


def binding(target: Any) -> str:
    """Return the module-level name of an overload: ``aten_silu``."""
    op, _, overload = target.__name__.partition(".")  # "sum.dim_IntList"
    suffix = f"_{overload}" if overload != "default" else ""
    return identifier(f"{target.namespace}_{op}{suffix}")


def _is_infix(node: Any) -> bool:
    return node.target in INFIX and not node.kwargs and len(node.args) == 2


_SPECIAL: dict[Any, Callable[[Printer, Node], str]] = {
    torch.ops.sp_compiler.convert.default: Printer._convert,
    torch.ops.sp_compiler.convert_in_place.default: Printer._convert,
    torch.ops.sp_compiler.wait.default: Printer._wait,
    aten.view.default: Printer._view,
    aten._unsafe_view.default: Printer._view,
    aten.transpose.int: Printer._turn,
    aten.permute.default: Printer._turn,
    aten.slice.Tensor: Printer._slice,
    aten.clone.default: Printer._clone,
    aten._to_copy.default: Printer._cast,
    aten.where.self: Printer._where,
    aten.native_layer_norm.default: Printer._layer_norm,
    aten._softmax.default: Printer._softmax,
    aten._log_softmax.default: Printer._softmax,
}
