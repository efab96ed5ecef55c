"""Operators at which a dim may be padded until it is divisible by the number of ranks.

A padded shard has zeros after the true elements in parameters and gradients, and finite values in
other tensors, so nothing has to be masked: a matmul that sums over a padded dim has zeros on at
least one side, and gradients of the padding are zero. The operators below preserve this; before any
other operator the dim is gathered. A loss over a padded vocabulary itself excludes the padding.

A padded head is computed like the others, from zeros: its scores are those of the mask, which all
heads share, its output is finite, and the weight of the matmul after attention is zero there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, shape_of, tensor_operands
from sp_compiler.ops.dropout import DROPOUT, DROPOUT_MASK
from sp_compiler.rules.factors import Factor, OpRule

_aten = torch.ops.aten

# Finite, with a finite derivative, for finite operands; they need not map zero to zero.
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
# Finite wherever the true elements along their other dims are, with any mask that those share.
ROWWISE = frozenset(
    {
        _aten._softmax.default,
        _aten.softmax.int,
        _aten.embedding.default,
        DROPOUT.overload,
        DROPOUT_MASK.overload,
    }
)
# Correct if they sum over dims other than the padded one.
SUMS = frozenset(
    {
        _aten.baddbmm.default,
        _aten.bmm.default,
        _aten.matmul.default,
        _aten.mean.dim,
        _aten.mm.default,
        _aten.sum.dim_IntList,
    }
)
# A mask that differs between heads would be zeros, or False, in the padding: it could forbid an
# entire row there, whose softmax is NaN.
_MASKED = {
    _aten.where.ScalarOther: "condition",
    _aten.where.ScalarSelf: "condition",
    _aten.where.self: "condition",
    _aten.masked_fill.Scalar: "mask",
    _aten.scaled_dot_product_attention.default: "attn_mask",
}
RELABELLING = frozenset(
    {
        _aten._to_copy.default,
        _aten.cat.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.reshape.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)
# Their result may be infinite where an operand is; that of all other operators is finite.
_PASSES_INFINITY = frozenset(
    {
        *(POINTWISE - {_aten.sigmoid.default, _aten.tanh.default}),
        *RELABELLING,
        _aten.div.Tensor,
        _aten.masked_fill.Scalar,
        _aten.where.ScalarOther,
        _aten.where.ScalarSelf,
        _aten.where.self,
    }
)
# Operators that a weight may pass on its way to a matmul: zeros stay zeros.
_KEEP_ZEROS = frozenset(
    {_aten._to_copy.default, _aten.permute.default, _aten.t.default, _aten.transpose.int}
)


def may_pad(node: Node, rule: OpRule, factor: Factor, is_parameter: Callable[[Node], bool]) -> bool:
    """Return whether the results of ``node`` are correct with operands padded along ``factor``.

    Args:
        rule: of ``node``.
        is_parameter: whether a node is a parameter, which is padded with zeros.
    """
    target = node.target
    # A value computed from a parameter need not be zero where the parameter is: exp(0) is 1.
    if target is _aten.linear.default:
        return all(_is_weight(operand, is_parameter) for operand in tensor_operands(node)[1:])
    if target is _aten.div.Tensor:
        # Division by a tensor might be 0 / 0 in the padding, and a NaN spreads in backward.
        return not isinstance(node.args[1], Node) and node.args[1] != 0 and _is_finite(node)
    if target in SUMS:
        # A matmul with a weight multiplies by its zeros; any other sum would include the padding.
        summed = any(factor.name == other.name for other in (*rule.contracted, *rule.averaged))
        is_product = target in (_aten.matmul.default, _aten.mm.default)
        weights = tensor_operands(node)[1:] if is_product else []
        return not summed or any(_is_weight(weight, is_parameter) for weight in weights)
    if target in (_aten.layer_norm.default, _aten.rms_norm.default, _aten.rsqrt.default):
        return _carries_rows_of_zeros(node)
    if target is _aten.pow.Tensor_Scalar:
        # The base may be negative in the padding even if it never is in the true elements.
        exponent = node.args[1]
        return exponent >= 1 and float(exponent).is_integer()
    if target is _aten.mul.Tensor:
        # A mask of -inf times a zero of the padding would be NaN.
        operands = tensor_operands(node)
        infinite = len(operands) > 1 and any(_may_be_infinite(x, is_parameter) for x in operands)
        return not infinite and _is_finite(node)
    if target in _MASKED:
        mask = arguments(node)[_MASKED[target]]
        return mask is None or not _runs_over(node, rule, mask, factor)
    return (target in POINTWISE and _is_finite(node)) or target in ROWWISE or target in RELABELLING


def _runs_over(node: Node, rule: OpRule, mask: Node, factor: Factor) -> bool:
    """Return whether a mask differs along ``factor``; an added bias is zero in the padding."""
    is_added = mask.meta["val"].dtype is not torch.bool
    if is_added and node.target is _aten.scaled_dot_product_attention.default:
        return False
    dims = rule.operands[tensor_operands(node).index(mask)]
    return any(item.name == factor.name for dim in dims for item in dim)


def _carries_rows_of_zeros(norm: Node) -> bool:
    """Return whether a norm, or the rsqrt in a decomposed one, is finite for rows of zeros."""
    if norm.target is _aten.rsqrt.default:
        return _is_positive(norm.args[0])
    # Rows of zeros have no variance: without eps they would be divided by 0. Norms compute in at
    # least float32.
    values = norm.args[0]
    assert isinstance(values, Node)
    dtype = torch.promote_types(values.meta["val"].dtype, torch.float32)
    return _is_enough(arguments(norm)["eps"], dtype)


def _is_positive(node: Any) -> bool:
    """Return whether ``node`` is a mean of squares plus a positive number: a decomposed norm's."""
    if not isinstance(node, Node) or node.target is not _aten.add.Tensor:
        return False
    mean, eps = node.args
    if not isinstance(mean, Node) or isinstance(eps, Node) or node.kwargs.get("alpha", 1) != 1:
        return False
    if not _is_enough(eps, node.meta["val"].dtype):
        return False
    if mean.target is not _aten.mean.dim or not isinstance(squares := mean.args[0], Node):
        return False
    is_even_power = squares.target is _aten.pow.Tensor_Scalar and squares.args[1] == 2
    is_product = squares.target is _aten.mul.Tensor and squares.args[0] is squares.args[1]
    return is_even_power or is_product or squares.target is _aten.square.default


def _is_enough(eps: float, dtype: torch.dtype) -> bool:
    """Return whether ``eps`` keeps a norm of zeros finite in ``dtype``, and its gradient."""
    return eps > 0 and eps**-1.5 < torch.finfo(dtype).max


def _may_be_infinite(node: Node, is_parameter: Callable[[Node], bool]) -> bool:
    """Return whether a mask may have put an infinity into a padded value, by selection or addition.

    Values from outside of the region are unknown. They reach the padding if one element of them is
    broadcast to several of the result; a value as large as the result, such as the probabilities of
    a soft target, is itself padded with zeros.
    """
    seen: set[tuple[Node, bool, bool]] = set()
    pending = [(node, False, False)]
    while pending:
        value, is_added, is_broadcast = item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        from_outside = value.op == "placeholder" and not is_parameter(value)
        if (is_added and is_broadcast and from_outside) or not _is_finite(value):
            return True
        if value.target in _PASSES_INFINITY:
            added = is_added or value.target in (_aten.add.Tensor, _aten.sub.Tensor)
            elements = math.prod(shape_of(value))
            pending += [
                (operand, added, is_broadcast or math.prod(shape_of(operand)) < elements)
                for operand in tensor_operands(value)
            ]
    return False


def _is_finite(node: Node) -> bool:
    """Return whether the scalar arguments are finite; they are combined with zeros of the
    padding."""
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, int | float)]
    return all(map(math.isfinite, numbers))


def _is_weight(node: Node, is_parameter: Callable[[Node], bool]) -> bool:
    while node.op == "call_function" and node.target in _KEEP_ZEROS:
        (node,) = tensor_operands(node)
    return is_parameter(node)
