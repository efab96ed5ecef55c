"""Rewriting of whole-model graphs in place, with every new node's metadata right.

Metadata kept by these helpers: ``val`` (FakeTensor without gradient, or a tuple of them),
``requires_grad`` (whether a gradient flows to the node in training), ``nn_module_stack`` and
``stack_trace`` (copied from the node that a new one stands for) and ``origin`` (the pass that made
the node).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from sp_compiler.ir.fx import carries_gradient, running_fakes

_INHERITED = ("nn_module_stack", "stack_trace", "torch_fn")


def is_call(node: object, *targets: Any) -> bool:
    """True where ``node`` is a call of one of ``targets`` (operator overloads, by identity)."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and any(node.target is target for target in targets)
    )


def calls(graph: Graph, *targets: Any) -> Iterator[Node]:
    """Calls of ``targets`` in graph order; the graph may be edited while iterating."""
    for node in list(graph.nodes):
        if is_call(node, *targets):
            yield node


_KNOWN_RESULTS: WeakKeyDictionary[FakeTensorMode, dict[str, tuple[Any, bool]]] = WeakKeyDictionary()


def output_node(graph: Graph) -> Node:
    """The one output node of ``graph``."""
    (node,) = graph.find_nodes(op="output")
    return node


def base_name(node: Node) -> str:
    """The node's name without the number that made it unique."""
    return re.sub(r"(_\d+)+$", "", node.name) or node.name


def shape_of(node: Node) -> tuple[int, ...]:
    """Static shape of the tensor that ``node`` returns."""
    return tuple(node.meta["val"].shape)


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The fake mode under which every ``val`` of ``graph`` lives; a new one for an empty graph."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor):
                return leaf.fake_mode  # type: ignore[attr-defined]
    return FakeTensorMode()


def refake(node: Node, mode: FakeTensorMode | None = None) -> None:
    """Run the operator of ``node`` on fakes; writes ``val`` and ``requires_grad``.

    Autograd itself says whether the result requires a gradient, so that non-differentiable
    operators need no table. Equal calls, which every further layer has, are run once.
    """
    mode = mode or fake_mode_of(node.graph)
    known = _KNOWN_RESULTS.setdefault(mode, {})
    call = _signature(node)
    if call not in known:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), _differentiable_fake)
        with running_fakes(mode), torch.enable_grad():
            set_value(node, node.target(*args, **kwargs))
        known[call] = (node.meta["val"], node.meta["requires_grad"])
    node.meta["val"], node.meta["requires_grad"] = known[call]
    node.meta.pop("tensor_meta", None)


def _signature(node: Node) -> str:
    """Everything that the result of a call on fakes depends on."""

    def describe(operand: Node) -> str:
        leaves = pytree.tree_leaves(operand.meta["val"])
        fakes = [
            (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]
        return f"<{fakes} {operand.meta['requires_grad']}>"

    return f"{node.target} {map_arg((node.args, dict(node.kwargs)), describe)}"


def set_value(node: Node, value: Any) -> None:
    """Record ``value`` (fake tensors that may require a gradient) as the result of ``node``."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    node.meta["requires_grad"] = any(leaf.requires_grad for leaf in leaves)
    node.meta["val"] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
    node.meta.pop("tensor_meta", None)


def insert_call(
    anchor: Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    origin: str,
    name: str | None = None,
) -> Node:
    """A new call in front of ``anchor``, with the source location of ``anchor`` and its own value.

    Args:
        anchor: node that the new call stands for or serves.
        target: operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        origin: name of the pass, kept in ``meta["origin"]``.
        name: wish for the node's name; the operator's by default.
    """
    name = name or target.__name__.split(".")[0]
    with anchor.graph.inserting_before(anchor):
        node = anchor.graph.create_node("call_function", target, args, kwargs or {}, name=name)
    inherit(node, anchor)
    node.meta["origin"] = origin
    refake(node)
    return node


def inherit(node: Node, other: Node) -> None:
    """Give ``node`` the module and the source line of ``other``."""
    node.meta.update({key: other.meta[key] for key in _INHERITED if key in other.meta})


def replace_call(
    node: Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    origin: str,
    name: str | None = None,
) -> Node:
    """Replace ``node`` by a call of ``target``; returns the new node."""
    new = insert_call(node, target, args, kwargs, origin=origin, name=name)
    replace_with(node, new)
    return new


def replace_with(node: Node, value: Node) -> None:
    """Let every user of ``node`` use ``value`` and erase ``node``."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def erase_dead(graph: Graph) -> int:
    """Erase calls without users (a captured graph is pure); returns how many."""
    num_erased = 0
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            num_erased += 1
    return num_erased


def _differentiable_fake(node: Node) -> Any:
    requires_grad = node.meta["requires_grad"]
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: _leaf(leaf, requires_grad), node.meta["val"]
    )


def _leaf(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return fake.detach().requires_grad_(requires_grad and carries_gradient(fake))


def is_getitem(node: object) -> bool:
    """True where ``node`` picks one result of an operator with several."""
    return is_call(node, operator.getitem)
