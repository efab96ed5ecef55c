"""Helpers to read and write FX graphs, shared by all passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import tree_iter, tree_map_only

import sp_compiler.ops.operators  # noqa: F401 - registers the operators
from sp_compiler.base.placement import Placement
from sp_compiler.ops.convert import conversion_between


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of an ATen call by schema name, defaults included."""
    schema = node.target._schema
    values: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def carries_gradient(value: Tensor) -> bool:
    """Whether a tensor of this dtype may require a gradient."""
    return value.is_floating_point() or value.is_complex()


def tensor_operands(node: Node) -> list[Node]:
    """Nodes among the arguments in order, repeats included (``x * x`` has two)."""
    return [leaf for leaf in tree_iter((node.args, node.kwargs)) if isinstance(leaf, Node)]


def fake_value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of calling ``target`` on the ``meta["val"]`` of its node arguments; no data moves."""
    args, kwargs = tree_map_only(Node, lambda node: node.meta["val"], (args, kwargs))
    mode = detect_fake_mode((args, kwargs))
    if mode is None:
        return target(*args, **kwargs)
    with running_fakes(mode), torch.no_grad():
        return target(*args, **kwargs)


@contextlib.contextmanager
def running_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Operators run without data; with open sizes none of them may ask for a size."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if mode.shape_env is not None:
            stack.enter_context(enable_python_dispatcher())
        yield


def emit(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: Node,
    origin: str,
    name: str | None = None,
) -> Node:
    """Append a call to ``graph`` whose meta says what it computes and where it came from.

    ``like`` gives the user's module, source line and ``requires_grad``; ``origin`` is the pass;
    ``name`` is what the node is called if it is free.
    """
    node = graph.create_node("call_function", target, args, kwargs or {}, name)
    for key in ("nn_module_stack", "stack_trace", "requires_grad"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["origin"] = origin
    node.meta["source"] = like.meta.get("source", like.name)
    node.meta["val"] = fake_value(target, args, kwargs or {})
    return node


def placements_of(node: Node) -> tuple[Placement, Placement] | None:
    """(source, destination) of a placement conversion, ``None`` for any other node."""
    if node.target is not torch.ops.sp_compiler.convert.default:
        return None
    return Placement.parse(node.args[1]), Placement.parse(node.args[2])


def is_collective(node: Node) -> bool:
    """Whether the node communicates: gather, scatter, reduction, or vocabulary-parallel loss."""
    if node.target is torch.ops.sp_compiler.vocab_nll.default:
        return True
    placements = placements_of(node)
    if placements is None:
        return False
    conversion = conversion_between(*placements)
    return conversion is not None and conversion.link_crossings > 0
