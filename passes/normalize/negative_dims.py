"""Dimension arguments counted from the end.

This is only done for operators with a sharding rule, whose dims are known to be those of their
first operand or of their result. For others ``-1`` may have another meaning ("all" for
``_weight_norm``); they run replicated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from sp_compiler.ir.fx import arguments
from sp_compiler.rules.families.fourier import PRIMITIVES
from sp_compiler.rules.table import has_rule

_DIM_ARGUMENTS = ("dim", "dim0", "dim1", "dims")
# Their dim argument counts the dims of the result, which has more dims than the operand or, for
# ``cat``, more than an empty operand with a single dim.
_OF_RESULT = (
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.select_backward.default,
)
# The primitive transforms accept no negative dims; cosine_similarity first broadcasts its operands.
_AS_GIVEN = {*PRIMITIVES, "aten::cosine_similarity"}


def make_dims_negative(graph: Graph) -> None:
    """Rewrite dimension arguments of ATen calls in place; a default dim becomes explicit.

    For rank 3 ``softmax(x, 2)`` -> ``softmax(x, -1)``, ``cat([x, x])`` -> ``cat([x, x], -3)``.
    """
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "aten" and has_rule(node):
            make_negative(node)


def make_negative(node: Node) -> None:
    """Rewrite the dimension arguments of one ATen call that has a rule."""
    bound = arguments(node)
    schema = node.target._schema
    if schema.name in _AS_GIVEN:
        return
    for position, argument in enumerate(schema.arguments):
        value = bound.get(argument.name)
        if argument.name not in _DIM_ARGUMENTS or value is None:
            continue
        # A leaf: the first argument of ``cat`` is a list.
        first = next(leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, Node))
        counted = (node if node.target in _OF_RESULT else first).meta["val"]
        rank = counted.ndim if isinstance(counted, Tensor) else 0
        if isinstance(value, int):
            value = value - rank if 0 <= value < rank else value
        else:
            value = [dim - rank if 0 <= dim < rank else dim for dim in value]
        # Positional if it was, or if it is the next position; this makes a default explicit.
        if position <= len(node.args) and not argument.kwarg_only:
            node.args = (*node.args[:position], value, *node.args[position + 1 :])
        else:
            node.kwargs = {**node.kwargs, argument.name: value}
