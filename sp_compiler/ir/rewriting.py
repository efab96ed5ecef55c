"""Helpers that change FX graphs: all call nodes of sp_compiler are created here, with metadata.

==================  =============================================================================
meta key            what the makers write
==================  =============================================================================
``val``             FakeTensor without gradient, or a tuple of them
``requires_grad``   whether a gradient flows to the node in training
``nn_module_stack``  of the node that the new one replaces or serves
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

# Not the placement nor any tag: those were said of the old node's result.
_INHERITED = ("nn_module_stack", "stack_trace", "requires_grad")

# One record per fake mode, which is one per capture: it goes when the capture goes.
_Known = dict[str, tuple[Any, Sequence[bool]]]
"""By call its result, and which of its leaves require a gradient."""
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
        name: proposal for the node's name; the operator's by default.
        meta: further entries, or entries that replace the default ones, such as ``val``.
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
    tags. If ``like`` is a node of the backward without a counterpart in the region, it has no
    ``source``, and neither has the new one: the name of ``like`` may belong to another node there.

    Args:
        changes: entries of ``meta`` that differ.
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
    """Insert a call of ``target`` in front of ``anchor``, which it replaces or serves.

    Like :func:`make_call`, but for graphs before differentiation: whether the result requires a
    gradient follows from the operands, not from ``anchor``.
    """
    # The report of the pass counts every call that it inserts, by operator.
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

    A ``value`` that a pass made keeps the name of what it replaces as ``meta["replaces"]``.
    """
    if "origin" in value.meta:
        value.meta.setdefault("replaces", node.meta.get("replaces", node.name))
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def replace_results(node: Node, values: Node | Sequence[Node]) -> None:
    """Like :func:`replace_with`, for a ``node`` that may have several results: ``values`` are all
    of them, and every user of ``node`` picks one."""
    if isinstance(values, Node):
        replace_with(node, values)
        return
    for user in list(node.users):
        assert user.target is operator.getitem
        replace_with(user, values[user.args[1]])
    node.graph.erase_node(node)


def merge_equal(nodes: Iterable[Node]) -> list[Node]:
    """Let equal calls among ``nodes``, in the order of their graph, be one; return for each that
    was erased the one that stands for it."""
    first: dict[str, Node] = {}
    merged = []
    for node in nodes:
        # As text, in which a node is its name and an open size its expression.
        equal = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            node.graph.erase_node(node)
            merged.append(equal)
    return merged


def erase_dead(graph: Graph) -> int:
    """Erase calls without users (a captured graph is pure); returns their number."""
    num_erased = 0
    # FX's own eliminate_dead_code keeps what draws random numbers. Backwards, so that a node with
    # dead users alone has lost them by the time that it is met.
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            num_erased += 1
    return num_erased


def inherit(node: Node, like: Node) -> None:
    """Give ``node``, created by another tracer, the module and source line of ``like``."""
    # No more than that: the other tracer knows the value better.
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
    """Append a copy of ``node`` to another graph, and note it in ``copies``, which has those of
    its operands.

    Args:
        name: proposal for the name of the copy; that of ``node`` by default.
    """
    args, kwargs = (map_arg(each, copies.__getitem__) for each in (node.args, node.kwargs))
    copies[node] = copy_call(graph, node, args, kwargs, name or node.name)


def copy_call(graph: Graph, node: Node, args: Any, kwargs: Any, name: str) -> Node:
    """Copy ``node`` into another graph, with other operands, another name and its meta.

    ``Graph.node_copy`` would reserve the name of ``node`` first and number later nodes differently.
    """
    # Operands apart: ``create_node`` looks for symbols among them, four fifths of its time.
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
            # torch internals: composite operators read sizes in C++, unless they decompose in
            # Python; an open size that is read becomes that of the example.
            stack.enter_context(enable_python_dispatcher())
        yield


def fake_value(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Node | None = None
) -> Any:
    """Call ``target`` on the ``meta["val"]`` of its node arguments, without data; ``like``: a node
    that has a value, for a call of no tensor."""
    # torch internals: detect_fake_mode. Values know their mode; a graph has no other place for it.
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
    """Value of a call on fakes, and whether it requires a gradient.

    Autograd itself decides, so no table of non-differentiable operators is needed. Equal calls, as
    in repeated layers, are run once.
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
    node.meta.pop("tensor_meta", None)  # torch's own record, of the value before


def _without_gradient(value: Any) -> tuple[Any, bool]:
    """Return ``value`` detached, and whether it required a gradient."""
    # A value in the meta of a node would otherwise keep the autograd graph of all before it.
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
    return detached, any(leaf.requires_grad for leaf in leaves)


def _text_of_call(
    known: _Known, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    # As a key: arguments hold lists and open sizes, which have no hash.
    return f"{target} {map_arg((args, dict(kwargs)), functools.partial(_described, known))}"


def _described(known: _Known, operand: Node) -> str:
    """All properties of ``operand`` that the result of a call on fakes depends on, as text."""
    fakes = [
        (tuple(x.shape), x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg())
        if isinstance(x, torch.Tensor)
        else x
        for x in pytree.tree_leaves(operand.meta["val"])
    ]
    return f"<{fakes} {_gradients_of_leaves(known, operand)}>"


def _differentiable_fake(known: _Known, node: Node) -> Any:
    leaves, spec = pytree.tree_flatten(node.meta["val"])
    # Detached: the fake itself belongs to the node, and must not become part of an autograd graph.
    fakes = [
        leaf.detach().requires_grad_(requires_grad and carries_gradient(leaf))
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf, requires_grad in zip(leaves, _gradients_of_leaves(known, node), strict=True)
    ]
    return pytree.tree_unflatten(fakes, spec)


def _gradients_of_leaves(known: _Known, node: Node) -> Sequence[bool]:
    """Return which of the values of ``node`` require a gradient.

    Of several results some may not: the new running statistics of a batch norm, which the next call
    of that norm takes, and with a gradient would refuse.
    """
    requires_grad, num = node.meta["requires_grad"], len(pytree.tree_leaves(node.meta["val"]))
    if requires_grad and num > 1 and node.op == "call_function":
        call = _text_of_call(known, node.target, node.args, node.kwargs)
        if call in known and len(known[call][1]) == num:
            return known[call][1]
    return [requires_grad] * num
