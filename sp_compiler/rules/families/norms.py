"""Rules of operators that work on each row separately: norms, softmax, sorting, and gradients."""

from __future__ import annotations

import math

from torch.fx import Node

from sp_compiler.ir.fx import arguments
from sp_compiler.rules.factors import (
    Dims,
    OpRule,
    broadcast,
    named,
    numbered,
    private,
)
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    LocalArguments,
    LocalCall,
    dims_by_name,
    operand_shapes,
    positive_dim,
    result_shapes,
    result_values,
    rule,
    schema_name,
    shape_of,
)


@rule("aten::layer_norm", "aten::rms_norm")
def _layer_norm(node: Node) -> OpRule | None:
    shapes, results = operand_shapes(node), result_shapes(node)
    if len(results) != 1:
        return None
    normalized = len(arguments(node)["normalized_shape"])
    rank = len(shapes[0])
    dims = numbered(shapes[0], blocked=range(rank - normalized, rank))
    # Weight and bias span only the blocked dims: replicated wherever the rows are cut.
    affine = tuple(broadcast(shape, dims, shapes[0]) for shape in shapes[1:])
    return OpRule((dims, *affine), (dims,))


def _num_groups(call: LocalCall) -> int:
    """The groups of channels that one rank has."""
    arg = "num_groups" if "num_groups" in call.arguments else "group"
    channels = shape_of(arguments(call.node)["input"])[1]
    return call.arguments[arg] * call.shape("input")[1] // channels


_LOCAL_GROUPS: LocalArguments = {
    "N": lambda call: call.shape("input")[0],
    "C": lambda call: call.shape("input")[1],
    "group": _num_groups,
    "HxW": lambda call: math.prod(call.shape("input")[2:]),
}


@rule("aten::group_norm", local_arguments={"num_groups": _num_groups})
@rule("aten::native_group_norm", "aten::native_group_norm_backward", local_arguments=_LOCAL_GROUPS)
def _group_norm(node: Node) -> OpRule:
    """Channels may be sharded by groups.

    Results of the native form: the normalized input and two statistics per sample and group. Of its
    backward: the gradients of the input, and of weight and bias summed over everything else.
    """
    args = arguments(node)
    shape = shape_of(args["input"])
    num_groups = args["num_groups"] if "num_groups" in args else args["group"]
    batch = named(shape[:1], "b")
    # A channel is (group, channel of the group): the groups may be cut, not what is averaged.
    groups = named((num_groups,), "g")
    channels = (*groups[0], *private((shape[1] // num_groups,), "c")[0])
    image, statistics = (*batch, channels, *private(shape[2:], "x")), (*batch, *groups)

    def dims(name: str, operand: Node) -> Dims:
        if name in ("mean", "rstd"):
            return statistics
        return (channels,) if name in ("weight", "bias") else image

    operands = dims_by_name(node, dims)
    # Gradients of channels are sums over the batch: partial if it is cut.
    if "grad_out" in args:
        results = (image, (channels,), (channels,))
        return OpRule(operands, results, contracted=batch[0], linear=FIRST_OPERAND, rows="fixed")
    others = [statistics] * (len(result_values(node)) - 1)
    return OpRule(operands, (image, *others), rows="fixed")


@rule(
    *("aten::_native_batch_norm_legit_functional", "aten::_native_batch_norm_legit"),
    *("aten::_native_batch_norm_legit_no_training", "aten::native_batch_norm_backward"),
)
def _batch_norm(node: Node) -> OpRule:
    """Each channel has its own statistics, over the batch and the image.

    Results: the normalized input and two statistics per channel, which are empty if the running
    ones are used. Of the backward: the gradients of input, weight and bias.
    """
    args = arguments(node)
    shape = shape_of(args["input"])
    # Running statistics are not sums over the batch, which may be cut then.
    is_running = "no_training" in str(node.target)
    image = numbered(shape, () if is_running else [dim for dim in range(len(shape)) if dim != 1])

    def per_channel(value_shape: tuple[int, ...]) -> Dims:
        return image[1:2] if value_shape == shape[1:2] else private(value_shape, "empty")

    def dims(name: str, operand: Node) -> Dims:
        return image if name in ("input", "grad_out") else per_channel(shape_of(operand))

    # A value is missing if no gradient is needed: for a norm that is frozen or has no weight.
    values = result_values(node)[1:]
    others = [shape[1:2] if value is None else tuple(value.shape) for value in values]
    results = (image, *map(per_channel, others))
    linear = FIRST_OPERAND if "grad_out" in args else ()
    whole = tuple(index for index, shape in enumerate(others, 1) if shape == (0,))
    operands = dims_by_name(node, dims)
    # Dim 1 holds the channels, wherever the tokens are.
    return OpRule(operands, results, linear=linear, rows="fixed", whole=whole)


@rule("aten::log_softmax", "aten::_log_softmax", "aten::_safe_softmax")
def _log_softmax(node: Node) -> OpRule:
    """The class dim keeps its factor, so that a loss of the result can be sharded by class."""
    (shape,) = operand_shapes(node)
    dims = numbered(shape, blocked=(positive_dim(arguments(node)["dim"], len(shape)),))
    return OpRule((dims,), (dims,))


@rule(
    *("aten::softmax", "aten::_softmax", "aten::topk", "aten::sort", "aten::argsort"),
    *("aten::cumsum", "aten::cumprod", "aten::cummax", "aten::cummin", "aten::logcumsumexp"),
)
def _softmax(node: Node) -> OpRule:
    """The operator works along one dim, which may change its size, separately for each row."""
    (shape,) = operand_shapes(node)
    dim = positive_dim(arguments(node)["dim"], len(shape))
    dims = numbered(shape, blocked=(dim,))
    results = tuple(
        (*dims[:dim], *private(result[dim : dim + 1], "r"), *dims[dim + 1 :])
        for result in result_shapes(node)
    )
    # cumsum is the only linear operator among them.
    linear = FIRST_OPERAND if schema_name(node) == "aten::cumsum" else ()
    return OpRule((dims,), results, linear=linear)


@rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(node: Node) -> OpRule:
    shape = shape_of(node)
    dims = numbered(shape, blocked=(positive_dim(arguments(node)["dim"], len(shape)),))
    # Linear in the gradient, not in the probabilities.
    return OpRule((dims, dims), (dims,), linear=FIRST_OPERAND)


def _normalized(node: Node) -> tuple[Dims, int]:
    """Dims of the input of a norm, the normalized ones blocked, and how many come before those."""
    shape = shape_of(arguments(node)["input"])
    num_rows = len(shape) - len(arguments(node)["normalized_shape"])
    return numbered(shape, blocked=range(num_rows, len(shape))), num_rows


def _norm_operands(node: Node, dims: Dims, num_rows: int) -> tuple[Dims, ...]:
    statistics = (*dims[:num_rows], *[()] * (len(dims) - num_rows))

    def of(name: str, operand: Node) -> Dims:
        if name in ("mean", "rstd"):
            return statistics
        return dims[num_rows:] if name in ("weight", "bias") else dims

    return dims_by_name(node, of)


@rule("aten::native_layer_norm", "aten::_fused_rms_norm")
def _norm(node: Node) -> OpRule:
    """Results: the normalized input and one or two statistics per row."""
    dims, num_rows = _normalized(node)
    statistics = (*dims[:num_rows], *[()] * (len(dims) - num_rows))
    results = (dims, *[statistics] * (len(result_values(node)) - 1))
    return OpRule(_norm_operands(node, dims, num_rows), results)


@rule("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward")
def _norm_backward(node: Node) -> OpRule:
    """Results: the gradients of the input, and of weight and bias summed over the rows."""
    dims, num_rows = _normalized(node)
    results = (dims, *[dims[num_rows:]] * (len(result_values(node)) - 1))
    # Gradients of weight and bias add up over rows: partial wherever the rows are cut.
    rows = tuple(factor for dim in dims[:num_rows] for factor in dim)
    operands = _norm_operands(node, dims, num_rows)
    return OpRule(operands, results, contracted=rows, linear=FIRST_OPERAND)
