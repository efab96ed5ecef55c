"""Operators at which a dim may be padded until it is divisible by the number of ranks.

A padded shard has zeros after the true elements in parameters and gradients, and finite numbers in
other values, so nothing has to be masked: a product that sums over a padded dim has zeros on at
least one side, and gradients of the padding are zero. The operators below preserve this; before all
others the dim is gathered. A loss over a padded vocabulary excludes the padding itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from sp_compiler.ir.fx import tensor_operands

_aten = torch.ops.aten

# Finite, with a finite derivative, wherever their operands are; zero at zero is not needed.
POINTWISE = frozenset(
    {
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.neg.default,
        _aten.gelu.default,
        _aten.relu.default,
        _aten.sigmoid.default,
        _aten.silu.default,
        _aten.tanh.default,
        _aten.square.default,
    }
)
RELABELLING = frozenset(
    {
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.permute.default,
        _aten.reshape.default,
        _aten.slice.Tensor,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)
# What a weight may go through on its way to a product: zeros stay zeros.
_KEEP_ZEROS = frozenset(
    {_aten._to_copy.default, _aten.permute.default, _aten.t.default, _aten.transpose.int}
)


def may_pad(node: Node, is_parameter: Callable[[Node], bool]) -> bool:
    """Return whether the results of ``node`` are right with padded operands.

    Args:
        is_parameter: whether a node is a parameter, which is padded with zeros.
    """
    # What is computed from a parameter need not be zero where that is: exp(0) is 1.
    if node.target is _aten.linear.default:
        return all(_is_weight(operand, is_parameter) for operand in tensor_operands(node)[1:])
    if node.target is _aten.div.Tensor:
        # By a tensor it might be 0 / 0 in the padding, and a NaN there spreads in backward.
        return not isinstance(node.args[1], Node) and node.args[1] != 0 and _is_finite(node)
    return (node.target in POINTWISE and _is_finite(node)) or node.target in RELABELLING


def _is_finite(node: Node) -> bool:
    """Return whether the numbers among the arguments are finite; they are combined with zeros of
    the padding."""
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, int | float)]
    return all(map(math.isfinite, numbers))


def _is_weight(node: Node, is_parameter: Callable[[Node], bool]) -> bool:
    while node.op == "call_function" and node.target in _KEEP_ZEROS:
        (node,) = tensor_operands(node)
    return is_parameter(node)
