"""Activation functions that a model spells out, as the operator that computes them in one pass.

::

    0.5 * x * (1 + tanh(0.797... * (x + 0.0447... * x**3)))  -->  gelu(x, approximate="tanh")
    x * 0.5 * (1 + erf(x / 1.414...))                        -->  gelu(x)
    x * sigmoid(x)                                           -->  silu(x)

GPT-2's takes eight passes over memory forward and more backward, which reads five tensors of it;
the operator takes one each, and backward reads ``x``.

There are many spellings, so chains of elementwise operators of one tensor are compared by what they
compute, in float64, at points of all magnitudes. Only smooth operators qualify: a clamp whose bound
is beyond those points would go unnoticed. Chains that agree at all points are the same function in
the dtype of the tensor, with the same derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import layer_of
from sp_compiler.ir.rewriting import insert_call, replace_with
from sp_compiler.ir.symbolic import is_open, same_shape

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_Activation = tuple[Any, Mapping[str, Any]]
"""An operator with a kernel for each direction, and its keyword arguments."""
_ACTIVATIONS: tuple[_Activation, ...] = (
    (_aten.gelu.default, {"approximate": "tanh"}),
    (_aten.gelu.default, {}),
    (_aten.silu.default, {}),
    (_aten.mish.default, {}),
)
# What formulas of activation functions are made of.
_SMOOTH = frozenset({
    _aten.add.Tensor, _aten.sub.Tensor, _aten.rsub.Scalar, _aten.mul.Tensor, _aten.div.Tensor,
    _aten.neg.default, _aten.reciprocal.default, _aten.square.default, _aten.sqrt.default,
    _aten.pow.Tensor_Scalar, _aten.exp.default, _aten.log.default, _aten.log1p.default,
    _aten.tanh.default, _aten.erf.default, _aten.sigmoid.default, _aten.softplus.default,
})  # fmt: skip
_MOST_OPERATORS = 12  # in a chain; the longest spelling that is known has eight


def name_activations(graph: Graph) -> None:
    """Replace every such chain of which only the end is read."""
    positions = {node: position for position, node in enumerate(graph.nodes)}
    known: dict[str, _Activation | None] = {}
    # From the end, so that a chain is found as a whole before its parts, which it replaces.
    for node in reversed(list(graph.nodes)):
        if not node.users or not _is_smooth(node) or not _is_floating(node):
            continue
        for source, chain in _chains(node, positions):
            key = _text(source, chain)
            # Layers write it the same way: each way is evaluated once.
            if key not in known:
                known[key] = _activation(source, chain)
            if (activation := known[key]) is not None:
                operator, options = activation
                call = insert_call(node, operator, (source,), options, origin=_ORIGIN)
                replace_with(node, call)
                for part in chain[1:]:
                    graph.erase_node(part)
                break


def _chains(end: Node, positions: Mapping[Node, int]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield ``(source, chain)`` wherever ``end`` is a function of ``source`` alone.

    The chain has the operators from ``end`` back to the source, within one layer. Only ``end`` is
    read by other nodes.
    """
    chain = [end]
    while len(chain) <= _MOST_OPERATORS:
        operands = {operand for node in chain for operand in node.all_input_nodes}
        sources = operands.difference(chain)
        # The last of them: all that reads it within the chain is part of it by now.
        latest = max(sources, key=positions.__getitem__, default=None)
        if latest is None or not _is_like(latest, end):
            return
        if len(sources) == 1 and len(chain) > 1:
            yield latest, chain
        if not _is_smooth(latest) or not latest.users.keys() <= set(chain):
            return
        if layer_of(latest) != layer_of(end):  # layers stay apart, each a region of its own
            return
        chain.append(latest)


def _is_smooth(node: Node) -> bool:
    if node.target not in _SMOOTH:
        return False
    # Computing with an open size would record that it is the example's.
    return not any(map(is_open, tree_leaves((node.args, node.kwargs))))


def _is_floating(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_like(node: Node, other: Node) -> bool:
    value, example = node.meta["val"], other.meta["val"]
    return (
        isinstance(value, Tensor)
        and value.dtype is example.dtype
        and same_shape(value.shape, example.shape)
    )


def _text(source: Node, chain: Sequence[Node]) -> str:
    """Return the calls of a chain as text that is the same in every layer."""
    names = {node: f"%{number}" for number, node in enumerate((*chain, source))}
    calls = (map_arg((x.args, x.kwargs), names.__getitem__) for x in chain)
    targets = (str(node.target) for node in chain)
    return f"{source.meta['val'].dtype} {[*zip(targets, calls, strict=True)]}"


def _activation(source: Node, chain: Sequence[Node]) -> _Activation | None:
    """Return the activation function of ``source`` that a chain computes, if it is known."""
    dtype = source.meta["val"].dtype
    points, activations = _known_values()
    values = {source: points}
    for node in reversed(chain):
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    # An eighth of the dtype's rounding error, but not less than that of the chain in float64. For
    # 16 bits float32's: in 16 bits the two forms of GELU, for example, could not be told apart.
    precision = max(min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 8, 2e-15)
    for activation, expected in zip(_ACTIVATIONS, activations, strict=True):
        if bool(((values[chain[0]] - expected).abs() <= precision * points.abs()).all()):
            return activation
    return None


@functools.cache
def _known_values() -> tuple[Tensor, tuple[Tensor, ...]]:
    """Points, and the values of each activation function there."""
    options: Any = {"dtype": torch.float64, "device": "cpu"}
    # Where they curve; near zero and far out, points of all magnitudes are enough.
    near = torch.linspace(-12, 12, 1001, **options)
    tiny_to_large = torch.logspace(-8, 4, 121, **options)
    points = torch.cat([near, tiny_to_large, -tiny_to_large])
    with torch.no_grad():
        return points, tuple(call(points, **options) for call, options in _ACTIVATIONS)
