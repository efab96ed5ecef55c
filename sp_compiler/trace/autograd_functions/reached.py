"""Gradients that their own tangents do not determine.

All derivatives of PyTorch are linear: no gradient of the results, no gradient of the operands. A
backward of the user's own may be something else, such as the ones of a function that attaches an
auxiliary loss to an activation. It runs if a gradient reaches any of its results, with zeros for
those that none reaches. In a traced graph an operator says so::

    reached(ones, [grad_y])           without a gradient of y nothing, else ones
    reached(grad_b, [grad_a, grad_b]) with a gradient of only a zeros
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.utils import _pytree as pytree

from sp_compiler.base.provenance import source_line
from sp_compiler.ir.compiled_program import Reached
from sp_compiler.ir.fx import ancestors, arguments, tensor_operands
from sp_compiler.ir.op_traits import COPIES, FILLED, is_view

_library = torch.library.Library("sp_compiler_function", "FRAGMENT")
_library.define("reached(Tensor gradient, Tensor[] tangents) -> Tensor")
# Not an alias, which torch could not functionalize. No program runs it.
_library.impl("reached", lambda gradient, _: gradient.clone(), "CompositeExplicitAutograd")
REACHED = torch.ops.sp_compiler_function.reached.default

_LINEAR = frozenset({"aten", "prims", "sp_compiler", "higher_order"})
"""Namespaces of operators whose backward is linear."""
_PRODUCTS = frozenset({"mul", "mm", "bmm"})
"""Operators whose result is zero if an operand is."""
_KEEP_ZEROS = frozenset({
    "add", "sub", "cat", "neg", "sum", "mean", "abs", "sign", "tanh", "relu", "round", "cumsum",
    "flip", "roll",
})  # fmt: skip
"""Operators whose result is zero if all operands are."""
_CHOOSE = {"div": "self", "index": "self", "index_select": "self", "gather": "self"}
"""Operators whose result is zero if this operand is."""


class ReachedGradients(Interpreter):
    """Runs a graph to be differentiated; operators with a backward of the user's own get and return
    gradients that are :data:`REACHED`."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call ``target``."""
        if getattr(target, "namespace", "aten") in _LINEAR:
            return super().call_function(target, args, kwargs)
        backward = _Backward()
        args, kwargs = _marked(partial(_Operands.apply, backward), (args, kwargs))
        results = super().call_function(target, args, kwargs)
        return _marked(partial(_Results.apply, backward), results)


class _Backward:
    """One backward of an operator: the gradients that have reached its results."""

    def __init__(self) -> None:
        self.tangents: list[Tensor] = []

    def mark(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        return [None if grad is None else REACHED(grad, self.tangents) for grad in grads]


class _Operands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: _Backward, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.own = backward
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten.alias.default(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.own.mark(grads)


class _Results(_Operands):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.own.tangents = [grad for grad in grads if grad is not None]
        return _Operands.backward(ctx, *grads)


def _marked(function: Callable[..., Sequence[Tensor]], tree: Any) -> Any:
    """Return ``tree`` with ``function`` of its tensors that require a gradient."""
    leaves, spec = pytree.tree_flatten(tree)
    places = [at for at, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places:
        for at, value in zip(places, function(*[leaves[at] for at in places]), strict=True):
            leaves[at] = value
    return pytree.tree_unflatten(leaves, spec)


def outputs_behind(graph: Graph, tangents: Mapping[Node, int]) -> dict[Node, frozenset[int]]:
    """Return, for each node whose values depend on ``tangents``, the outputs that these belong
    to."""
    outputs = {tangent: frozenset({output}) for tangent, output in tangents.items()}
    for node in graph.nodes:
        operands = [outputs[each] for each in node.all_input_nodes if each in outputs]
        if operands and node.op == "call_function" and node.target not in FILLED:
            outputs[node] = frozenset().union(*operands)
    return outputs


def reached_from(
    graph: Graph, tangents: Mapping[Node, int], grads: Sequence[Node | None]
) -> Reached:
    """Return from which outputs the ``grads`` of a joint graph flow."""
    outputs = outputs_behind(graph, tangents)
    given = ((index, grad) for index, grad in enumerate(grads) if grad is not None)
    inputs = {index: outputs.get(grad, frozenset()) for index, grad in given}
    marks = graph.find_nodes(op="call_function", target=REACHED)
    lines = (source_line(node) or "of an unknown line" for node in marks)
    functions = dict.fromkeys(
        (line, outputs.get(node, frozenset())) for line, node in zip(lines, marks, strict=True)
    )
    num_all = len(tangents)
    return Reached(
        {index: found for index, found in inputs.items() if len(found) < num_all},
        tuple((line, found) for line, found in functions if len(found) < num_all),
    )


def drop_determined(graph: Graph, tangents: Mapping[Node, int]) -> None:
    """Drop each :data:`REACHED` that says nothing: its gradient depends on all of its tangents, and
    is zero if these are. Most functions are like this."""
    outputs = outputs_behind(graph, tangents)
    for node in graph.find_nodes(op="call_function", target=REACHED):
        gradient, of = node.args
        if outputs.get(gradient) == outputs.get(node) and _is_zero_with(gradient, of):
            _drop(node)


def _is_zero_with(gradient: Node, tangents: Sequence[Node]) -> bool:
    """Return whether ``gradient`` is known to be zero if ``tangents`` are."""
    zero = set(tangents)
    between = ancestors([gradient], zero)
    for node in gradient.graph.nodes:
        if node in between and node.op == "call_function" and _keeps_zeros(node, zero):
            zero.add(node)
    return gradient in zero


def _keeps_zeros(node: Node, zero: Collection[Node]) -> bool:
    if node.target in FILLED:
        return FILLED[node.target] == 0
    namespace, _, name = getattr(node.target, "_name", "aten::").partition("::")
    name = name.partition(".")[0]
    if namespace not in _LINEAR:  # a kernel of the user's own may compute anything
        return False
    if name in _PRODUCTS or "backward" in name:
        return any(each in zero for each in node.all_input_nodes)
    if name in _CHOOSE:
        return arguments(node)[_CHOOSE[name]] in zero
    if name == "where":
        bound = arguments(node)
        return all(bound.get(each) in (0, *zero) for each in ("self", "other"))
    if not (name in _KEEP_ZEROS or is_view(node) or node.target in COPIES):
        return False
    # A number that is added.
    if name in ("add", "sub") and len(tensor_operands(node)) < 2:
        return False
    return bool(node.all_input_nodes) and all(each in zero for each in node.all_input_nodes)


def drop_all(graph: Graph) -> None:
    """Drop every :data:`REACHED`: a gradient reaches all of them."""
    for node in graph.find_nodes(op="call_function", target=REACHED):
        _drop(node)


def _drop(node: Node) -> None:
    # Not replace_with(), which would name the gradient after the mark.
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)
