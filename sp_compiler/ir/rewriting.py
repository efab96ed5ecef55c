"""Helpers that change FX graphs: all call nodes of sp_compiler are created here, with metadata.

==================  =============================================================================
meta key            value in a new node
==================  =============================================================================
``val``             FakeTensor without gradient, or a tuple of them
``requires_grad``   whether a gradient flows to the node in training
``nn_module_stack``  that of the node that the new one replaces or serves
``stack_trace``     likewise
``source``          name of the node that the new one replaces, in the graph before the pass
``origin``          name of the pass that made the node
==================  =============================================================================
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from sp_compiler.base.pass_report import report_of
from sp_compiler.ir.fx import carries_gradient

# Neither the placement nor tags: they belong to the old node's result.
_INHERITED = ("nn_module_stack", "stack_trace", "requires_grad")

# One table per fake mode, of which each capture has one; it is freed with the capture.
_Known = dict[str, tuple[Any, Sequence[bool]]]
"""Result of each call, and which of its leaves require a gradient."""
_KNOWN_RESULTS: WeakKeyDictionary[FakeTensorMode, _Known] = WeakKeyDictionary()


def make_call(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Node,
    origin: str,
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Node:
    """Add a call of ``target`` at the insertion point of ``graph``; returns the new node.

    Args:
        graph: the graph, whose nodes have ``meta["val"]``.
        target: operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        like: node that the new one replaces or serves, from which it gets the user's module, the
            source line and ``requires_grad``.
        origin: name of the pass.
        name: suggested name of the node; the operator's by default.
        meta: additional entries, and entries that replace the default ones, such as ``val``.
    """
    node = graph.create_node("call_function", target, args, dict(kwargs or {}), name)
    # ``source`` is inherited: a node that replaces a replacement names the original.
    node.meta = {
        **{key: like.meta[key] for key in _INHERITED if key in like.meta},
        **(meta or {}),
        "origin": origin,
        "source": like.meta.get("source", like.name),
    }
    if "val" not in node.meta:
        node.meta["val"] = fake_value(target, args, kwargs or {}, like=like)
    return node


def make_like(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Node,
    origin: str,
    name: str | None = None,
    **changes: Any,
) -> Node:
    """Add a call of ``target`` in place of ``like``, in its graph or a copy, with all of its meta.

    Like :func:`make_call`, but the new node gets all entries of ``like``, including placement and
    tags. If ``like`` is a node of the backward without a counterpart in the region, neither it nor
    the new node has a ``source``: in the region, its name may belong to another node.

    Args:
        changes: entries of ``meta`` that differ from those of ``like``.
    """
    node = graph.create_node("call_function", target, args, dict(kwargs or {}), name)
    node.meta = {**like.meta, **changes, "origin": origin}
    return node


def insert_call(
    anchor: Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    origin: str,
    name: str | None = None,
) -> Node:
    """Insert a call of ``target`` before ``anchor``, which it replaces or serves.

    Like :func:`make_call`, but for graphs before differentiation: whether the result requires a
    gradient follows from the operands, not from ``anchor``.
    """
    # The report of the pass counts the inserted calls by operator.
    report_of(origin).rewrote(kind=target.__name__.split(".")[0])
    val, requires_grad = differentiable_result(fake_mode_of(anchor.graph), target, args, kwargs)
    with anchor.graph.inserting_before(anchor):
        return make_call(
            anchor.graph, target, args, kwargs, like=anchor, origin=origin,
            name=name or target.__name__.split(".")[0],
            meta={"val": val, "requires_grad": requires_grad},
        )  # fmt: skip


def replace_call(
    node: Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    origin: str,
    name: str | None = None,
) -> Node:
    """Replace ``node`` by a call of ``target``; returns the new node."""
    new = insert_call(node, target, args, kwargs, origin=origin, name=name)
    replace_with(node, new)
    return new


def replace_with(node: Node, value: Node) -> None:
    """Make every user of ``node`` use ``value``, and erase ``node``.

    A ``value`` that a pass made keeps the name of the replaced node as ``meta["replaces"]``.
    """
    if "origin" in value.meta:
        value.meta.setdefault("replaces", node.meta.get("replaces", node.name))
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def replace_results(node: Node, values: Node | Sequence[Node]) -> None:
    """Like :func:`replace_with`, for a ``node`` that may have several results: ``values`` are all
    results, and every user of ``node`` is a ``getitem`` of one."""
    if isinstance(values, Node):
        replace_with(node, values)
        return
    for user in list(node.users):
        assert user.target is operator.getitem
        replace_with(user, values[user.args[1]])
    node.graph.erase_node(node)


def merge_equal(nodes: Iterable[Node]) -> list[Node]:
    """Merge equal calls among ``nodes``, which are in graph order; return the replacement of each
    erased node."""
    first: dict[str, Node] = {}
    merged = []
    for node in nodes:
        # As text, with the name of a node and the expression of an open size.
        equal = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            node.graph.erase_node(node)
            merged.append(equal)
    return merged


def erase_dead(graph: Graph) -> int:
    """Erase calls without users (a captured graph is pure); returns their number."""
    num_erased = 0
    # FX's own eliminate_dead_code keeps operators that draw random numbers. Backwards, so that a
    # node whose users are all dead has lost them when it is visited.
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            num_erased += 1
    return num_erased


def inherit(node: Node, like: Node) -> None:
    """Give ``node``, created by another tracer or for ``like``, its module and source line."""
    # Only these: the other tracer has recorded the value.
    keys = ("nn_module_stack", "stack_trace")
    node.meta.update({key: like.meta[key] for key in keys if key in like.meta})


def copy_graph(graph: Graph) -> Graph:
    """Copy ``graph`` with the same node names and the same meta entries."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copy_node(copy, node, copies)
    return copy


def subgraph(
    inputs: Sequence[Node], calls: Sequence[Node], results: Sequence[Node | None]
) -> Graph:
    """Return a graph of copies of ``calls``, in this order, with ``inputs`` as its placeholders."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in calls:
        copy_node(graph, node, copies)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    graph.lint()
    return graph


def copy_node(graph: Graph, node: Node, copies: dict[Node, Node], name: str | None = None) -> None:
    """Append a copy of ``node`` to another graph, and add it to ``copies``, which has those of its
    operands.

    Args:
        name: suggested name of the copy; that of ``node`` by default.
    """
    args, kwargs = (map_arg(each, copies.__getitem__) for each in (node.args, node.kwargs))
    copies[node] = copy_call(graph, node, args, kwargs, name or node.name)


def copy_call(graph: Graph, node: Node, args: Any, kwargs: Any, name: str) -> Node:
    """Copy ``node`` into another graph, with other operands, another name and its meta.

    ``Graph.node_copy`` would reserve the name of ``node`` first and number later nodes differently.
    """
    # Operands are set separately: ``create_node`` spends four fifths of its time looking for
    # symbols among them.
    copy = graph.create_node(node.op, node.target, name=name, type_expr=node.type)
    copy.args, copy.kwargs = args, kwargs
    copy.meta = dict(node.meta)
    return copy


# Values without data.


@contextlib.contextmanager
def running_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Context that runs operators without data and without specialising open sizes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if mode.shape_env is not None:
            # torch internals: composite operators read sizes in C++ unless they decompose in
            # Python; an open size that is read is specialized to the example's.
            stack.enter_context(enable_python_dispatcher())
        yield


def fake_value(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Node | None = None
) -> Any:
    """Call ``target`` on the ``meta["val"]`` of its node arguments, without data; ``like``: a node
    that has a value, for a call without tensor arguments."""
    # torch internals: detect_fake_mode. The mode of a graph is stored only in its values.
    args, kwargs = pytree.tree_map_only(Node, lambda node: node.meta["val"], (args, dict(kwargs)))
    mode = detect_fake_mode((args, kwargs, None if like is None else like.meta.get("val")))
    if mode is None:  # no tensor among the arguments, or real ones
        return target(*args, **kwargs)
    with running_fakes(mode), torch.no_grad():
        return target(*args, **kwargs)


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """Return the fake mode shared by the ``val`` of all nodes; a new one for a graph without
    tensors."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor):
                return leaf.fake_mode  # type: ignore[attr-defined]
    return FakeTensorMode()


def differentiable_result(
    mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[Any, bool]:
    """Return the value of a call on fakes, and whether it requires a gradient.

    Autograd itself decides, so no table of non-differentiable operators is needed. Equal calls, as
    in repeated layers, run once.
    """
    known = _KNOWN_RESULTS.setdefault(mode, {})
    call = _text_of_call(known, target, args, kwargs or {})
    if call not in known:
        fakes = functools.partial(_differentiable_fake, known)
        args, kwargs = map_arg((args, dict(kwargs or {})), fakes)
        with running_fakes(mode), torch.enable_grad():
            result = target(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        flags = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        known[call] = _without_gradient(result)[0], flags
    value, of_leaves = known[call]
    return value, any(of_leaves)


def refake(node: Node, mode: FakeTensorMode | None = None) -> None:
    """Rerun the operator of ``node`` on fakes and write ``val`` and ``requires_grad``."""
    mode = mode or fake_mode_of(node.graph)
    _record(node, *differentiable_result(mode, node.target, node.args, node.kwargs))


def set_value(node: Node, value: Any) -> None:
    """Record ``value`` (fake tensors that may require a gradient) as the result of ``node``."""
    _record(node, *_without_gradient(value))


def _record(node: Node, value: Any, requires_grad: bool) -> None:
    node.meta["val"], node.meta["requires_grad"] = value, requires_grad
    node.meta.pop("tensor_meta", None)  # torch's own record, now outdated


def _without_gradient(value: Any) -> tuple[Any, bool]:
    """Return ``value`` detached, and whether it required a gradient."""
    # Otherwise a value in the meta of a node would keep the autograd graph of all its ancestors.
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
    return detached, any(leaf.requires_grad for leaf in leaves)


def _text_of_call(
    known: _Known, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    # Used as a key: arguments contain lists and open sizes, which are not hashable.
    return f"{target} {map_arg((args, dict(kwargs)), functools.partial(_described, known))}"


def _described(known: _Known, operand: Node) -> str:
    """Return all properties of ``operand`` that affect the result of a call on fakes, as text."""
    fakes = [
        (tuple(x.shape), x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg())
        if isinstance(x, torch.Tensor)
        else x
        for x in pytree.tree_leaves(operand.meta["val"])
    ]
    return f"<{fakes} {_gradients_of_leaves(known, operand)}>"


def _differentiable_fake(known: _Known, node: Node) -> Any:
    leaves, spec = pytree.tree_flatten(node.meta["val"])
    # Detached, since the fake itself must not become part of an autograd graph.
    fakes = [
        leaf.detach().requires_grad_(requires_grad and carries_gradient(leaf))
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf, requires_grad in zip(leaves, _gradients_of_leaves(known, node), strict=True)
    ]
    return pytree.tree_unflatten(fakes, spec)


def _gradients_of_leaves(known: _Known, node: Node) -> Sequence[bool]:
    """Return which of the values of ``node`` require a gradient.

    Some results of an operator may not require one: the new running statistics of a batch norm are
    arguments of its next call, which would refuse them with a gradient.
    """
    requires_grad, num = node.meta["requires_grad"], len(pytree.tree_leaves(node.meta["val"]))
    if requires_grad and num > 1 and node.op == "call_function":
        call = _text_of_call(known, node.target, node.args, node.kwargs)
        if call in known and len(known[call][1]) == num:
            return known[call][1]
    return [requires_grad] * num
