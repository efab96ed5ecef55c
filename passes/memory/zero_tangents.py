"""Specialise a backward graph for zero tangents: operators that depend only on them are dropped.

======================  =========================
before, ``z`` zero      after
======================  =========================
``f(z)``, ``z * x``     zero
``x + z``, ``z + x``    ``x``
``x - z``               ``x``
any other use of ``z``  one of ``zeros(shape)``
gradient ``z``          ``None``
======================  =========================

A backward is linear in its tangents: if all tangent-dependent operands of an operator are zero, so
is its result. Those of the user's own functions may be something else
(:mod:`sp_compiler.trace.autograd_functions.reached`)::

    reached(x, [z])       zero: the function's backward does not run
    reached(z, [z, g])    zeros(shape), which the function gets
    reached(x, [z, g])    x
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.op_traits import FILLED
from sp_compiler.ir.rewriting import erase_dead, make_call
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.autograd_functions.reached import REACHED, drop_all

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def drop_zero_tangents(graph: Graph, tangents: Collection[Node], zero: Collection[Node]) -> None:
    """Rewrite ``graph`` in place, given that ``zero``, some of its ``tangents``, are zero.

    The placeholders of ``zero`` and nodes that are no longer needed are removed.
    """
    linear, nothing = set(tangents), set(zero)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        moving = [operand for operand in node.all_input_nodes if operand in linear]
        if not moving:
            continue
        if node.target in FILLED:  # it reads only the shape
            _without_zeros(node, nothing)
            continue
        linear.add(node)
        if node.target is REACHED:
            gradient, moving = node.args
            if gradient in nothing and not nothing.issuperset(moving):
                node.replace_input_with(gradient, _zeros(node, gradient.meta["val"], gradient))
                continue
        # Erased below as dead code, once the output does not use it.
        if all(operand in nothing for operand in moving):
            nothing.add(node)
        elif node.target is not REACHED and any(operand in nothing for operand in moving):
            _without_zeros(node, nothing)
    output = graph.output_node()
    output.args = (tuple(None if grad in nothing else grad for grad in output.args[0]),)
    drop_all(graph)
    erase_dead(graph)
    # Last: until their users are gone, they cannot be erased.
    for node in zero:
        graph.erase_node(node)
    graph.lint()


def _without_zeros(node: Node, nothing: set[Node]) -> None:
    """Drop a zero summand; give any other user of a zero a tensor of zeros."""
    kept = _other_summand(node, nothing)
    if kept is not None:
        node.replace_all_uses_with(kept)
        return
    for operand in dict.fromkeys(tensor_operands(node)):
        if operand in nothing:
            node.replace_input_with(operand, _zeros(node, operand.meta["val"], operand))


def _other_summand(node: Node, nothing: set[Node]) -> Node | None:
    """``x`` of ``x + z`` and ``x - z`` if it can replace the result."""
    if node.target not in _SUMS:
        return None
    call = arguments(node)
    first, second = call["self"], call["other"]
    if second in nothing:
        kept = first
    elif node.target is aten.add.Tensor and call["alpha"] == 1:  # for "z - x" it would be -x
        kept = second
    else:
        return None
    # The sum may broadcast or widen it; the summand itself would not.
    value, result = kept.meta["val"], node.meta["val"]
    same = same_shape(value.shape, result.shape) and value.dtype == result.dtype
    return kept if same else None


def _zeros(before: Node, value: Tensor, like: Node) -> Node:
    with before.graph.inserting_before(before):
        return make_call(
            before.graph,
            aten.zeros.default,
            (list(value.shape),),
            {"dtype": value.dtype, "device": value.device},
            like=like,
            origin=Pass.PARTITION,
            meta={"val": value},
        )
