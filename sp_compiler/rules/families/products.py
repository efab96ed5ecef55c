"""Rules of matmuls and convolutions, and of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.rules.factors import (
    Dim,
    Dims,
    Factor,
    OpRule,
    broadcast,
    named,
    numbered,
    private,
)
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    LocalCall,
    operand_shapes,
    positive_dim,
    result_shapes,
    rule,
    shape_of,
)

aten = torch.ops.aten


@rule("aten::linear")
def _linear(node: Node) -> OpRule | None:
    """With a bias the inner dim cannot be sharded: every rank would add the bias."""
    x, weight, *bias = operand_shapes(node)
    if len(weight) != 2:
        return None
    # Leading dims are numbered, so that they can be tokens; width and outputs have other names, so
    # that a dim of the input is never taken for one of the weight.
    dims = (*numbered(x[:-1]), *named(weight[1:], "i"))
    out, inner = Factor("o", weight[0]), Factor("i", weight[1])
    operands: tuple[Dims, ...] = (dims, ((out,), (inner,)))
    results = ((*dims[:-1], (out,)),)
    if bias:
        # It may be a single number for all outputs.
        summand = broadcast(bias[0], results[0], (*x[:-1], weight[0]))
        return OpRule((*operands, summand), results, linear=((0, 2), (1, 2)))
    return OpRule(operands, results, contracted=(inner,), linear=((0,), (1,)))


@rule("aten::mm", "aten::bmm", "aten::matmul")
def _matmul(node: Node) -> OpRule | None:
    left, right = operand_shapes(node)
    if len(left) < 2 or len(right) < 2:
        return None
    (result,) = result_shapes(node)
    batch = numbered(result[:-2])
    inner = Factor("k", left[-1])
    m, n = named(left[-2:-1], "m")[0], named(right[-1:], "n")[0]
    operands = (
        (*broadcast(left[:-2], batch, result[:-2]), m, (inner,)),
        (*broadcast(right[:-2], batch, result[:-2]), (inner,), n),
    )
    return OpRule(
        operands,
        ((*batch, m, n),),
        contracted=(inner,),
        linear=((0,), (1,)),
        # Batch dims of the right factor correspond to those of the left, which rows would merge.
        rows="leading" if len(right) == 2 else "fixed",
    )


@rule("aten::baddbmm")
def _baddbmm(node: Node) -> OpRule:
    bias, left, _right = operand_shapes(node)
    (result,) = result_shapes(node)
    dims = named(result, "bmn")
    inner = Factor("k", left[-1])
    # ``inner`` is not contracted: every rank would add the bias.
    operands = (
        broadcast(bias, dims, result),
        (dims[0], dims[1], (inner,)),
        (dims[0], (inner,), dims[2]),
    )
    return OpRule(operands, (dims,), rows="fixed")


@rule(*("aten::cdist", "aten::_cdist_forward", "aten::_euclidean_dist", "aten::_cdist_backward"))
def _distances(node: Node) -> OpRule:
    """``b m k, b n k -> b m n``; of the backward, the gradient of the first."""
    args, (result,) = arguments(node), result_shapes(node)
    batch = numbered(result[:-2])
    first, second = shape_of(args["x1"]), shape_of(args["x2"])
    (m,), (n,), k = named(first[-2:-1], "m"), named(second[-2:-1], "n"), private(first[-1:], "k")
    pairs = (*batch, m, n)
    # By position, not by name: both may be one tensor.
    points = tuple(
        (*broadcast(shape[:-2], batch, result[:-2]), own, *k)
        for shape, own in ((first, m), (second, n))
    )
    if node.target is not torch.ops.aten._cdist_backward.default:
        return OpRule(points, (pairs,), rows="fixed")
    operands, grad = (pairs, *points, pairs), (*batch, m, *k)
    return OpRule(operands, (grad,), contracted=n, linear=FIRST_OPERAND, rows="fixed")


@rule("aten::linalg_solve_triangular")
def _solve_triangular(node: Node) -> OpRule:
    """``A X = B`` for each column of ``B``, or ``X A = B`` for each row."""
    matrix, right = operand_shapes(node)
    (result,) = result_shapes(node)
    is_left = arguments(node)["left"]
    batch, rows = numbered(result[:-2]), result[-2:]
    own = (*private(rows[:1], "m"), *named(rows[1:], "n"))
    if not is_left:
        own = (*named(rows[:1], "m"), *private(rows[1:], "n"))
    of_matrix, of_right = (broadcast(shape[:-2], batch, result[:-2]) for shape in (matrix, right))
    operands = (*of_matrix, *private(matrix[-2:], "a")), (*of_right, *own)
    return OpRule(operands, ((*batch, *own),), linear=((1,),), rows="fixed")


@rule("aten::linalg_cross")
def _cross(node: Node) -> OpRule:
    (result,) = result_shapes(node)
    dims = numbered(result, blocked=(positive_dim(arguments(node)["dim"], len(result)),))
    operands = tuple(broadcast(shape, dims, result) for shape in operand_shapes(node))
    return OpRule(operands, (dims,), linear=((0,), (1,)), rows="broadcast")


@rule("aten::addmm")
def _addmm(node: Node) -> OpRule:
    """The inner dim cannot be sharded: every rank would add the bias."""
    bias, left, _ = (shape_of(operand) for operand in tensor_operands(node))
    result = shape_of(node)
    dims = named(result, "mn")
    inner = Factor("k", left[1])
    operands = (broadcast(bias, dims, result), (dims[0], (inner,)), ((inner,), dims[1]))
    return OpRule(operands, (dims,), linear=((0, 1), (0, 2)))


@rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_mm(node: Node) -> OpRule | None:
    """Rows sorted by expert times one matrix per expert: ``(s, k) @ (e, k, n) -> (s, n)``.

    And the gradient of those matrices, ``(k, s) @ (s, n) -> (e, k, n)``. The dim of experts is not
    sharded: which rows belong to an expert depends on data.
    """
    shapes = operand_shapes(node)
    if [len(shape) for shape in shapes] == [2, 2, 1]:
        left, right = Factor("k", shapes[0][0]), Factor("n", shapes[1][1])
        s, e = private(shapes[1][:1], "s")[0], private(shapes[2], "e")[0]
        of_weight = (e, (left,), (right,))
        parts = (((left,), s), (s, (right,)), (e,))
        return OpRule(parts, (of_weight,), linear=((0,), (1,)), rows="fixed")
    if [len(shape) for shape in shapes] != [2, 3, 1]:
        return None
    rows, weight, _ = shapes
    inner, out = Factor("k", rows[1]), Factor("n", weight[2])
    # Rows are blocked: the end offsets of the experts count all rows from the front.
    s, e = private(rows[:1], "s")[0], private(weight[:1], "e")[0]
    operands = ((s, (inner,)), (e, (inner,), (out,)), (e,))
    return OpRule(operands, ((s, (out,)),), contracted=(inner,), linear=((0,), (1,)), rows="fixed")


@rule("transformers::grouped_mm_fallback_backward")
def _grouped_mm_backward(node: Node) -> OpRule:
    """Results: the gradients of rows and weights; one is partial if a dim is sharded."""
    rows, weight, _, _ = operand_shapes(node)
    # Cut outputs make the gradient of the rows partial, cut inputs shard both results.
    inner, out = Factor("k", rows[1]), Factor("n", weight[2])
    s, e = private(rows[:1], "s")[0], private(weight[:1], "e")[0]
    grad_rows, grad_weight = (s, (inner,)), (e, (inner,), (out,))
    operands = (grad_rows, grad_weight, (e,), (s, (out,)))
    results = (grad_rows, grad_weight)
    return OpRule(operands, results, contracted=(out,), linear=((3,),), rows="fixed")


def _local_groups(call: LocalCall) -> int:
    """The groups of channels that one rank has."""
    is_backward = "grad_output" in call.arguments
    result = call.shape("grad_output") if is_backward else call.result_shapes[0]
    return _groups(call.arguments, call.shape("input"), call.shape("weight"), result)


def _groups(
    given: Mapping[str, Any], image: Sequence[int], weight: Sequence[int], result: Sequence[int]
) -> int:
    """The number of groups, from the shapes: the argument may be that of another part."""
    # Dim 1 of a weight counts the inputs of one group, for a transposed convolution the outputs.
    channels = result if given.get("transposed", False) else image
    # Counted from the end: there may be no batch dim.
    return channels[1 - len(weight)] // weight[1]


@rule(
    *("aten::convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d"),
    local_arguments={"groups": _local_groups},
)
def _convolution(node: Node) -> OpRule | None:
    """Output channels may be sharded, or the groups if there are several."""
    (image, weight, *bias), (result,) = operand_shapes(node), result_shapes(node)
    if len(result) != len(weight):
        return None  # without a batch dim
    batch = named(image[:1], "b")
    channels, out, weight_dims = _channels(node, image, weight, result)
    operands: tuple[Dims, ...] = ((*batch, channels, *private(image[2:], "x")), weight_dims)
    if bias:
        operands += ((out,),)
    return OpRule(operands, ((*batch, out, *private(result[2:], "y")),), rows="fixed")


def _channels(
    node: Node, image: Sequence[int], weight: Sequence[int], result: Sequence[int]
) -> tuple[Dim, Dim, Dims]:
    """Factors of the channels of a convolution's input and output, and dims of its weight."""
    given = arguments(node)
    groups = _groups(given, image, weight, result)
    if not groups:  # a check may try such shapes
        raise ArgumentError(f"{node.name}: a weight {tuple(weight)} needs more channels than given")
    inner, outer = private((image[1] // groups,), "c")[0], private((result[1] // groups,), "o")[0]
    shared: Dim = (Factor("g", groups),)
    # One group: every output sums all input channels, and ranks would add the bias to each part.
    if groups == 1:
        shared, outer = (), (Factor("o", result[1]),)
    channels, out = (*shared, *inner), (*shared, *outer)
    of_weight = (channels, outer) if given.get("transposed", False) else (out, inner)
    return channels, out, (*of_weight, *private(weight[2:], "w"))


@rule(
    "aten::convolution_backward",
    local_arguments={
        "bias_sizes": lambda call: list(call.result_shapes[2]),
        "groups": _local_groups,
    },
)
def _convolution_backward(node: Node) -> OpRule:
    args = arguments(node)
    grad, image, weight = (shape_of(args[name]) for name in ("grad_output", "input", "weight"))
    batch = named(grad[:1], "b")
    channels, out, weight_dims = _channels(node, image, weight, grad)
    image_dims = (*batch, channels, *private(image[2:], "x"))
    # With groups each rank has the complete gradient of its own input channels.
    summed = () if out[0].name == "g" else out
    return OpRule(
        ((*batch, out, *private(grad[2:], "y")), image_dims, weight_dims),
        (image_dims, weight_dims, (out,)),
        contracted=(*(factor for dim in batch for factor in dim), *summed),
        linear=FIRST_OPERAND,
    )
