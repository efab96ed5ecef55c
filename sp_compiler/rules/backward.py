"""Rules of the operators that appear when a region is differentiated: gradients and fused forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from sp_compiler.rules.table import convolution_channels, rule

_FIRST_OPERAND = ((0,),)


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _results(node: Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _by_name(node: Node, dims: Callable[[str, Node], Dims]) -> tuple[Dims, ...]:
    """Dims of the tensor operands of ``node`` in order, from their names in the schema."""
    found = {
        argument: dims(name, argument)
        for name, argument in arguments(node).items()
        if isinstance(argument, Node)
    }
    return tuple(found[operand] for operand in tensor_operands(node))


# Gradients of pointwise operators are linear in the incoming gradient, which comes first.


@rule(
    *(
        f"aten::{name}_backward"
        for name in (
            *("gelu", "silu", "tanh", "sigmoid", "threshold", "elu", "softplus", "leaky_relu"),
            *("hardtanh", "mish", "hardswish", "hardsigmoid"),
        )
    )
)
def _pointwise_backward(node: Node) -> OpRule:
    dims = numbered(_shape(node))
    operands = tuple(
        broadcast(_shape(operand), dims, _shape(node)) for operand in tensor_operands(node)
    )
    return OpRule(operands, (dims,), linear=_FIRST_OPERAND)


@rule("aten::detach", "aten::alias", "aten::lift_fresh_copy")
def _same(node: Node) -> OpRule:
    dims = numbered(_shape(node))
    return OpRule((dims,), (dims,), linear=_FIRST_OPERAND)


@rule("aten::masked_fill")
def _masked_fill(node: Node) -> OpRule:
    shape = _shape(node)
    dims = numbered(shape)
    operands = tuple(broadcast(_shape(operand), dims, shape) for operand in tensor_operands(node))
    value = arguments(node)["value"]
    is_zero = not isinstance(value, Node) and value == 0
    return OpRule(operands, (dims,), linear=_FIRST_OPERAND if is_zero else ())


@rule("aten::addmm")
def _addmm(node: Node) -> OpRule:
    """The inner dim cannot be sharded: every rank would add the bias."""
    bias, left, _ = (_shape(operand) for operand in tensor_operands(node))
    result = _shape(node)
    dims = named(result, "mn")
    inner = Factor("k", left[1])
    operands = (broadcast(bias, dims, result), (dims[0], (inner,)), ((inner,), dims[1]))
    return OpRule(operands, (dims,), linear=((0, 1), (0, 2)))


# Row-wise operators.


@rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(node: Node) -> OpRule:
    shape = _shape(node)
    dims = numbered(shape, blocked=(arguments(node)["dim"] % max(1, len(shape)),))
    return OpRule((dims, dims), (dims,), linear=_FIRST_OPERAND)


@rule("aten::_safe_softmax")
def _safe_softmax(node: Node) -> OpRule:
    shape = _shape(node)
    dims = numbered(shape, blocked=(arguments(node)["dim"] % max(1, len(shape)),))
    return OpRule((dims,), (dims,))


def _normalised(node: Node) -> tuple[Dims, int]:
    """Dims of the input of a norm, the normalised ones blocked, and how many come before those."""
    shape = _shape(arguments(node)["input"])
    num_rows = len(shape) - len(arguments(node)["normalized_shape"])
    return numbered(shape, blocked=range(num_rows, len(shape))), num_rows


def _norm_operands(node: Node, dims: Dims, num_rows: int) -> tuple[Dims, ...]:
    statistics = (*dims[:num_rows], *[()] * (len(dims) - num_rows))

    def of(name: str, operand: Node) -> Dims:
        if name in ("mean", "rstd"):
            return statistics
        return dims[num_rows:] if name in ("weight", "bias") else dims

    return _by_name(node, of)


@rule("aten::native_layer_norm", "aten::_fused_rms_norm")
def _norm(node: Node) -> OpRule:
    """Results: the normalised input and one or two statistics a row."""
    dims, num_rows = _normalised(node)
    statistics = (*dims[:num_rows], *[()] * (len(dims) - num_rows))
    results = (dims, *[statistics] * (len(_results(node)) - 1))
    return OpRule(_norm_operands(node, dims, num_rows), results)


@rule("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward")
def _norm_backward(node: Node) -> OpRule:
    """Results: the gradients of the input, and of weight and bias summed over the rows."""
    dims, num_rows = _normalised(node)
    results = (dims, *[dims[num_rows:]] * (len(_results(node)) - 1))
    rows = tuple(factor for dim in dims[:num_rows] for factor in dim)
    operands = _norm_operands(node, dims, num_rows)
    return OpRule(operands, results, contracted=rows, linear=_FIRST_OPERAND)


# Lookups and slices.


@rule("aten::embedding_dense_backward")
def _embedding_backward(node: Node) -> OpRule:
    grad, ids = (_shape(operand) for operand in tensor_operands(node))
    by_frequency = arguments(node)["scale_grad_by_freq"]
    dims = private(ids, "d") if by_frequency else numbered(ids)
    hidden = named(grad[-1:], "h")
    tokens = tuple(factor for dim in dims for factor in dim)
    table = (*private(_shape(node)[:1], "v"), *hidden)
    return OpRule(((*dims, *hidden), dims), (table,), contracted=tokens, linear=_FIRST_OPERAND)


@rule("aten::slice_backward", "aten::select_backward")
def _slice_backward(node: Node) -> OpRule:
    shape, grad = _shape(node), _shape(tensor_operands(node)[0])
    dim = arguments(node)["dim"] % len(shape)
    dims = numbered(shape, blocked=(dim,))
    operand = dims if len(grad) == len(shape) else (*dims[:dim], *dims[dim + 1 :])
    return OpRule((operand,), (dims,), linear=_FIRST_OPERAND)


@rule("aten::tril", "aten::triu")
def _triangle(node: Node) -> OpRule:
    shape = _shape(node)
    dims = numbered(shape, blocked=(len(shape) - 2, len(shape) - 1))
    return OpRule((dims,), (dims,), linear=_FIRST_OPERAND)


# Convolution and fused attention.


@rule("aten::convolution_backward")
def _convolution_backward(node: Node) -> OpRule | None:
    args = arguments(node)
    if args["transposed"]:
        return None
    grad, image, weight = (_shape(args[name]) for name in ("grad_output", "input", "weight"))
    batch = named(grad[:1], "b")
    channels, out = convolution_channels(image, weight)
    image_dims = (*batch, channels, *private(image[2:], "x"))
    weight_dims = (out, *private(weight[1:], "w"))
    summed = out if image[1] == weight[1] else ()
    return OpRule(
        ((*batch, out, *private(grad[2:], "y")), image_dims, weight_dims),
        (image_dims, weight_dims, (out,)),
        contracted=(*(factor for dim in batch for factor in dim), *summed),
        linear=_FIRST_OPERAND,
    )


_QUERY = ("query", "out", "grad_out", "grad_out_")
_KEY = ("key", "value")
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)


class _Attention:
    """Dims of the operands of a fused attention: batch and heads are shared, the rest is not."""

    def __init__(self, node: Node) -> None:
        args = arguments(node)
        self.query, self.key = _shape(args["query"]), _shape(args["key"])
        self.batch = named(self.query[:1], "b")[0]
        self.operands = _by_name(node, lambda name, operand: self.dims(name, operand))

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
        """What is added to the scores, or its gradient: without batch or heads where broadcast."""
        scores = (*self.query[:3], self.key[2])
        return broadcast(shape, self.heads(self.query[1], scores), scores)

    def heads(self, count: int, shape: Sequence[int]) -> Dims:
        """(b, a, private...); one factor for the heads of queries and grouped keys."""
        return (self.batch, (Factor("a", count),), *private(shape[2:], "x"))


def _position(node: Node, name: str) -> int:
    operands = tensor_operands(node)
    return operands.index(arguments(node)[name])


@rule(*_ATTENTION)
def _attention(node: Node) -> OpRule:
    """Results: the output, the logsumexp of each row, and what only the kernel itself reads."""
    attention = _Attention(node)
    shapes = [tuple(value.shape) for value in _results(node)[:2]]
    results = tuple(attention.heads(attention.query[1], shape) for shape in shapes)
    return OpRule(attention.operands, results, rows="fixed")


@rule(*(f"{name}_backward" for name in _ATTENTION))
def _attention_backward(node: Node) -> OpRule:
    """Results: the gradients of query, key, value and of a bias, which may be broadcast."""
    attention = _Attention(node)
    heads = (attention.query[1], attention.key[1], attention.key[1])
    *grads, bias = (*_results(node), None)[:4]
    results = tuple(
        attention.heads(count, tuple(value.shape))
        for count, value in zip(heads, grads, strict=True)
    )
    if bias is not None:
        results += (attention.bias(tuple(bias.shape)),)
    grad = "grad_out" if "grad_out" in arguments(node) else "grad_out_"
    linear = ((_position(node, grad),),)
    summed = tuple(factor for dim in results[0][:2] for factor in dim)
    return OpRule(attention.operands, results, contracted=summed, linear=linear, rows="fixed")


# Indexing by tensors, and its gradient, which adds into zeros. Linear in what holds the numbers.


def _indexed(rank: int, indices: Sequence[Any]) -> list[int] | None:
    """Dims that index tensors pick from, if they are adjacent (else the result is transposed)."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    adjacent = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    return dims if adjacent and len(indices) <= rank else None


def _index_dims(node: Node, source: tuple[int, ...]) -> tuple[Dims, Dims, list[Dims]] | None:
    """Dims of the indexed tensor, of what is picked from it, and of each index tensor."""
    indices = arguments(node)["indices"]
    dims = _indexed(len(source), indices)
    if dims is None or any(index.meta["val"].dtype == torch.bool for index in indices if index):
        return None
    shapes = [_shape(index) for index in indices if index is not None]
    picked_shape = tuple(torch.broadcast_shapes(*shapes))
    picked = private(picked_shape, "p")
    whole = numbered(source, blocked=dims)
    result = (*whole[: dims[0]], *picked, *whole[dims[-1] + 1 :])
    return whole, result, [broadcast(shape, picked, picked_shape) for shape in shapes]


@rule("aten::index")
def _index(node: Node) -> OpRule | None:
    found = _index_dims(node, _shape(tensor_operands(node)[0]))
    if found is None:
        return None
    whole, result, indices = found
    return OpRule((whole, *indices), (result,), linear=_FIRST_OPERAND, rows="fixed")


@rule("aten::index_put", "aten::_unsafe_index_put")
def _index_put(node: Node) -> OpRule | None:
    """Linear in the tensor and the values together where the values are added."""
    found = _index_dims(node, _shape(node))
    args = arguments(node)
    if found is None or not args["accumulate"]:
        return None
    whole, result, indices = found
    values = args["values"]
    put = broadcast(_shape(values), result, _index_result_shape(node, _shape(node)))
    last = len(indices) + 1
    return OpRule((whole, *indices, put), (whole,), linear=((0, last),), rows="fixed")


def _index_result_shape(node: Node, source: tuple[int, ...]) -> tuple[int, ...]:
    indices = arguments(node)["indices"]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    shapes = [_shape(index) for index in indices if index is not None]
    return (*source[: dims[0]], *torch.broadcast_shapes(*shapes), *source[dims[-1] + 1 :])
