"""Rules of attention in one operator, and of its fused forms and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.rules.factors import (
    Dims,
    Factor,
    OpRule,
    broadcast,
    named,
    numbered,
    private,
)
from sp_compiler.rules.registry import (
    dims_by_name,
    operand_shapes,
    result_values,
    rule,
    shape_of,
)

# Names of the same operands in the schemas of different kernels.
_QUERY = ("query", "out", "grad_out", "grad_out_")
_KEY = ("key", "value")
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)


@rule("aten::scaled_dot_product_attention")
def _sdpa(node: Node) -> OpRule | None:
    """Any number of dims before the heads, such as windows, all of them a batch."""
    shapes = operand_shapes(node)
    query, key, value = shapes[:3]
    # Query, key and value of one batch: a broadcast one would not share its factors.
    if not 3 <= len(query) == len(key) == len(value):
        return None
    if not query[:-3] == key[:-3] == value[:-3] or value[-3] != key[-3]:
        return None
    batch = numbered(query[:-3])
    heads = Factor("a", query[-3])
    # The heads factor of grouped keys and values has another size: it is cut only if both sizes are
    # divisible.
    kv_heads = heads if key[-3] == query[-3] else Factor("a", key[-3])
    # Width of the heads and sequences are private: scores mix all of a row, and a cut of the width
    # would leave partial scores before the softmax.
    q_dims: Dims = (*batch, (heads,), *private(query[-2:], "q"))
    operands = [q_dims]
    operands += [(*batch, (kv_heads,), *private(shape[-2:], "kv")) for shape in (key, value)]
    scores = (*query[:-1], key[-2])
    operands += [
        broadcast(mask, (*q_dims[:-2], *private(scores[-2:], "s")), scores) for mask in shapes[3:]
    ]
    # Linear only in the values; rows would be heads and positions, which flattening would merge.
    return OpRule(tuple(operands), (q_dims,), linear=((2,),), rows="fixed")


class _Attention:
    """Dims of the operands of a fused attention: batch and heads are common, the others are not."""

    def __init__(self, node: Node) -> None:
        args = arguments(node)
        self.query, self.key = shape_of(args["query"]), shape_of(args["key"])
        self.batch = named(self.query[:1], "b")[0]
        self.operands = dims_by_name(node, lambda name, operand: self.dims(name, operand))

    def dims(self, name: str, operand: Node) -> Dims:
        value = operand.meta["val"]
        if not isinstance(value, torch.Tensor):
            return ()
        shape = tuple(value.shape)
        if name in _QUERY:
            return self.heads(self.query[1], shape)
        if name in _KEY:
            return self.heads(self.key[1], shape)
        if name in ("logsumexp", "log_sumexp"):
            return self.heads(self.query[1], shape)
        if name in ("attn_mask", "attn_bias"):
            return self.bias(shape)
        return private(shape, name)

    def bias(self, shape: Sequence[int]) -> Dims:
        """The bias added to the scores, or its gradient: without batch or heads if broadcast."""
        scores = (*self.query[:3], self.key[2])
        return broadcast(shape, self.heads(self.query[1], scores), scores)

    def heads(self, count: int, shape: Sequence[int]) -> Dims:
        """(b, a, private...); one factor for the heads of queries and grouped keys."""
        return (self.batch, (Factor("a", count),), *private(shape[2:], "x"))


@rule(*_ATTENTION)
def _attention(node: Node) -> OpRule:
    """Results: the output, the logsumexp of each row, and values for the kernel's own backward."""
    attention = _Attention(node)
    shapes = [tuple(value.shape) for value in result_values(node)[:2]]
    results = tuple(attention.heads(attention.query[1], shape) for shape in shapes)
    return OpRule(attention.operands, results, rows="fixed")


@rule(*(f"{name}_backward" for name in _ATTENTION))
def _attention_backward(node: Node) -> OpRule:
    """Results: the gradients of query, key, value and of a bias, which may be broadcast."""
    attention = _Attention(node)
    heads = (attention.query[1], attention.key[1], attention.key[1])
    *grads, bias = (*result_values(node), None)[:4]
    results = tuple(
        attention.heads(count, tuple(value.shape))
        for count, value in zip(heads, grads, strict=True)
    )
    if bias is not None:
        results += (attention.bias(tuple(bias.shape)),)
    grad = "grad_out" if "grad_out" in arguments(node) else "grad_out_"
    linear = ((tensor_operands(node).index(arguments(node)[grad]),),)
    # A bias that was broadcast over batch or heads gets the sum over them: partial if they are cut.
    summed = tuple(factor for dim in results[0][:2] for factor in dim)
    return OpRule(attention.operands, results, contracted=summed, linear=linear, rows="fixed")
