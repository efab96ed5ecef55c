"""The canonical text of an FX graph, for golden tests and for people.

Values are renumbered in order, so that the text does not depend on node names::

    %0 = placeholder[x] : f32[2, 8] @ S(0)
    %1 = aten.linear(%0, %weight) : f32[2, 4] @ S(1) #save
    output(%1, None)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

Meta = Literal["val", "placement", "recompute"]
METAS: tuple[Meta, ...] = ("val", "placement", "recompute")

_DTYPES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def render(graph: Graph | GraphModule, *, metas: Collection[str] = METAS) -> str:
    """Render a graph, one line per node.

    Args:
        graph: any graph; it is not changed.
        metas: entries of each node's meta to append: ``"val"`` (`` : dtype[shape]``),
            ``"placement"`` (`` @ S(0)``) and ``"recompute"`` (`` #save``). Entries that a node
            lacks are omitted.
    """
    if isinstance(graph, GraphModule):
        graph = graph.graph
    # By position: FX's names depend on nodes that were erased before.
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    return "\n".join(render_node(node, numbers.__getitem__, metas) for node in graph.nodes)


def render_node(
    node: Node,
    name: Callable[[Node], str] = lambda node: f"%{node.name}",
    metas: Collection[str] = METAS,
) -> str:
    """Render one line for ``node``; ``name`` gives the name of a value."""
    suffix = render_metas(node, metas)
    if node.op == "output":
        # A user's graph may return a single value without a tuple around it.
        (values,) = node.args
        parts = values if isinstance(values, tuple | list) else (values,)
        return f"output({', '.join(render_value(part, name) for part in parts)}){suffix}"
    return f"{name(node)} = {render_call(node, name)}{suffix}"


def render_call(node: Node, name: Callable[[Node], str]) -> str:
    """Render a call: ``aten.add.Tensor(%0, 1.5, alpha=2)``."""
    if node.op == "placeholder":
        default = "".join(f" = {render_value(arg, name)}" for arg in node.args)
        return f"{render_target(node)}{default}"
    if node.op == "get_attr":
        return render_target(node)
    return f"{render_target(node)}({render_arguments(node, name)})"


def render_arguments(node: Node, name: Callable[[Node], str]) -> str:
    """Render positional and keyword arguments as they are written in a call."""
    parts = [render_value(arg, name) for arg in node.args]
    parts += [f"{key}={render_value(arg, name)}" for key, arg in node.kwargs.items()]
    return ", ".join(parts)


def render_metas(node: Node, metas: Collection[str]) -> str:
    """Render the part after a call: `` : f32[2, 4] @ S(1) #save``."""
    marks = {"val": " : ", "placement": " @ ", "recompute": " #"}
    # In the order of METAS, not of ``metas``, since the text is compared.
    texts = {meta: meta_text(node, meta) for meta in METAS if meta in metas}
    return "".join(f"{marks[meta]}{text}" for meta, text in texts.items() if text)


def meta_text(node: Node, meta: Meta) -> str:
    """Render one entry of the node's meta, "" if it has none."""
    value = node.meta.get(meta)
    if value is None:
        return ""
    return render_type(value) if meta == "val" else str(value)


def render_target(node: Node) -> str:
    """Render ``aten.linear``, ``aten.add.Tensor``, ``getitem``, ``.view``, ``placeholder[x]``."""
    target = node.target
    if isinstance(target, str):
        forms = {"call_method": ".{}", "call_module": "module[{}]", "output": "{}"}
        return forms.get(node.op, f"{node.op}[{{}}]").format(target)
    return render_function(target)


def render_function(function: Any) -> str:
    """Render the name of an operator or function, without the overload ``default``."""
    if isinstance(function, torch._ops.OpOverload):
        return str(function).removesuffix(".default")
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if name is None:  # a callable object
        return _plain(function)
    # The names of torch's builtins have classes such as ``_VariableFunctionsClass``.
    short = name.rpartition(".")[2]
    if getattr(torch, short, None) is function:
        return f"torch.{short}"
    # ``getitem`` and other builtins are known without their module.
    module = getattr(function, "__module__", None) or ""
    return name if module in ("_operator", "builtins", "") else f"{module}.{name}"


def render_type(value: Any) -> str:
    """Render ``f32[2, 4]`` for a tensor, ``(f32[2], i64[])`` for several, else the value."""
    if isinstance(value, Tensor):
        return f"{render_dtype(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(render_type(item) for item in value)})"
    return _plain(value)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``, as in messages, plans and hardware profiles."""
    return str(dtype).removeprefix("torch.")


def describe_tensor(value: Tensor) -> str:
    """Return ``float32 (2, 4)``: dtype and shape, for messages."""
    return f"{dtype_name(value.dtype)} {tuple(value.shape)}"


def render_dtype(dtype: torch.dtype) -> str:
    """Render ``f32``, ``bf16``, ``i64``, ``bool``; torch's name if there is no short one."""
    text = dtype_name(dtype)
    # Names other than letters and one number, such as float8_e4m3fn, have no short form.
    stem = text.rstrip("0123456789")
    return _DTYPES[stem] + text[len(stem) :] if stem in _DTYPES else text


def render_value(value: Any, name: Callable[[Node], str]) -> str:
    """Render an argument: nodes by ``name``, containers by item, no memory addresses."""
    if isinstance(value, Node):
        return name(value)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(render_value(part, name) for part in parts)})"
    if isinstance(value, dict):
        items = (f"{key!r}: {render_value(item, name)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        text = ", ".join(render_value(item, name) for item in value)
        if isinstance(value, list):
            return f"[{text}]"
        return f"({text},)" if len(value) == 1 else f"({text})"
    return _plain(value)


def _plain(value: Any) -> str:
    """Return ``repr`` if it is the same in every run, else the type of the object."""
    if isinstance(value, Tensor):
        return f"tensor {render_type(value)}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    if isinstance(value, torch._ops.OpOverload | types.FunctionType | types.BuiltinFunctionType):
        return render_function(value)
    text = repr(value)
    # Goldens and fingerprints of ranks compare this text; an address would differ in every run.
    return f"<{type(value).__qualname__}>" if " at 0x" in text else text
