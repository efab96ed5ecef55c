"""Rules of elementwise operators and of their gradients."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, carries_gradient, tensor_operands
from sp_compiler.rules.factors import (
    OpRule,
    broadcast,
    numbered,
    private,
)
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    LocalCall,
    operand_shapes,
    result_shapes,
    rule,
    shape_of,
)
from sp_compiler.trace.autograd_functions import is_pointwise_function

# Sets of operands in which an operator is jointly linear, so that partial sums pass through it.
_ADDITIVE = {"add", "sub"}
_UNARY_LINEAR = {
    "neg",
    "_to_copy",
    "to",
    "clone",
    "contiguous",
    "dropout",
    "native_dropout_backward",
}


def _linear_sets(node: Node, count: int) -> tuple[tuple[int, ...], ...]:
    name = node.target._schema.name.split("::")[1]
    if name in _ADDITIVE and count == 2:
        return ((0, 1),)
    # Bilinear: the product of two partial factors has cross terms, which no sum of parts has.
    if name == "mul":
        return tuple((position,) for position in range(count))
    if name == "div" and not arguments(node).get("rounding_mode"):
        return ((0,),)
    if name == "where":
        return _linear_in_where(node, count)
    if name in ("_conj", "conj_physical", "complex"):
        return (tuple(range(count)),)
    if name == "copy":  # the value that is overwritten does not matter
        return ((1,),) if carries_gradient(node.meta["val"]) else ()
    if name in _UNARY_LINEAR:
        # A cast to integers truncates: the sum of truncated parts is another number.
        values = tensor_operands(node)[0].meta["val"], node.meta["val"]
        return ((0,),) if all(map(carries_gradient, values)) else ()
    return ()


def _linear_in_where(node: Node, count: int) -> tuple[tuple[int, ...], ...]:
    """Linear in two values, or in one if the other is a scalar zero: each rank would add any other
    scalar once."""
    if count == 3:
        return ((1, 2),)
    values = (arguments(node)["self"], arguments(node)["other"])
    has_zero = any(not isinstance(value, Node) and value == 0 for value in values)
    return ((1,),) if count == 2 and has_zero else ()


# Those without PyTorch's pointwise tag, which covers all others.
@rule(
    *("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::to", "aten::where"),
    *("aten::native_dropout_backward", "aten::log_sigmoid", "aten::floor_divide", "aten::copy"),
    *("aten::_conj", "aten::conj_physical", "aten::complex", "aten::polar"),
    *("aten::hardswish", "aten::rsub", "aten::_prelu_kernel"),
)
def pointwise(node: Node) -> OpRule | None:
    shapes, results = operand_shapes(node), result_shapes(node)
    if len(results) != 1:
        return None  # such as frexp: the rule is for one result
    dims = numbered(results[0])
    operands = tuple(broadcast(shape, dims, results[0]) for shape in shapes)
    linear = _linear_sets(node, len(shapes))
    return OpRule(operands, (dims,), linear=linear, rows="broadcast")


_ELEMENT_LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
)


@rule("aten::l1_loss", *(f"aten::{name}" for name in _ELEMENT_LOSSES))
def _loss_of_elements(node: Node) -> OpRule | None:
    """Normalization leaves only losses without reduction."""
    return None if arguments(node)["reduction"] else pointwise(node)


@rule(*(f"aten::{name}_backward" for name in _ELEMENT_LOSSES))
def _loss_of_elements_backward(node: Node) -> OpRule | None:
    return None if arguments(node)["reduction"] else _pointwise_backward(node)


def _placed_dim(call: LocalCall) -> int:
    """The sharded dim of a part, which determines its position in the global tensor."""
    placement = call.results[0]
    if placement.kind == "T":
        return 0  # rows are flattened to one dim, which is cut
    return placement.dim if placement.is_sharded else call.arguments["dim"]


def _placed_padding(call: LocalCall) -> int:
    return call.results[0].padding(call.world_size)


def _placed_ranks(call: LocalCall) -> int:
    return call.world_size if call.results[0].is_sharded else call.arguments["world_size"]


@rule(
    "sp_compiler::dropout",
    "sp_compiler::dropout_mask",
    local_arguments={
        "dim": _placed_dim,
        "world_size": _placed_ranks,
        "padding": _placed_padding,
    },
)
def _dropout(node: Node) -> OpRule:
    (shape,) = result_shapes(node)
    dims = numbered(shape)
    # The mask of a partial sum is that of the sum; a mask itself has no addends.
    linear = ((0,),) if node.target is torch.ops.sp_compiler.dropout.default else ()
    return OpRule((dims, ()), (dims,), linear=linear, rows="broadcast", placed=True)


@rule(
    "sp_compiler::uniform",
    local_arguments={
        "size": lambda call: list(call.result_shapes[0]),
        "dim": _placed_dim,
        "world_size": _placed_ranks,
    },
)
def _uniform(node: Node) -> OpRule:
    dims = numbered(result_shapes(node)[0])
    return OpRule(((),), (dims,), rows="broadcast", placed=True)


@rule("sp_compiler::checked_ids")
def _checked_ids(node: Node) -> OpRule:
    dims = numbered(result_shapes(node)[0])
    return OpRule((dims,), (dims,), rows="broadcast", segmented=False)


@rule("sp_compiler_function::apply")
def _autograd_function(node: Node) -> OpRule | None:
    shapes, results = operand_shapes(node), result_shapes(node)
    dtypes = tuple(operand.meta["val"].dtype for operand in tensor_operands(node))
    if len({*shapes, *results}) != 1 or not is_pointwise_function(
        arguments(node)["call"], len(shapes[0]), dtypes
    ):
        return None
    dims = numbered(shapes[0])
    # Not linear: its code was traced for dependence between elements, not for linearity.
    return OpRule((dims,) * len(shapes), (dims,) * len(results), rows="broadcast")


@rule(
    *(
        f"aten::{name}_backward"
        for name in (
            *("gelu", "silu", "tanh", "sigmoid", "threshold", "elu", "softplus", "leaky_relu"),
            *("hardtanh", "mish", "hardswish", "hardsigmoid", "_prelu_kernel"),
        )
    )
)
def _pointwise_backward(node: Node) -> OpRule:
    """Results: the gradient of each operand; a second one is not yet summed to the operand."""
    shape, *others = result_shapes(node)
    dims = numbered(shape)
    operands = tuple(broadcast(each, dims, shape) for each in operand_shapes(node))
    return OpRule(operands, (dims,) * (1 + len(others)), linear=FIRST_OPERAND)


@rule("aten::prelu")
def _prelu(node: Node) -> OpRule:
    """A slope for each index of dim 1, or one for all."""
    shape, slopes = operand_shapes(node)
    dims = numbered(shape)
    of_slopes = dims[1:2] if slopes == shape[1:2] else private(slopes, "w")
    return OpRule((dims, of_slopes), (dims,))


@rule("aten::log_sigmoid_forward")
def _log_sigmoid(node: Node) -> OpRule:
    """Results: the logarithm, and a buffer for backward, which is empty on a GPU."""
    dims, (shape, buffer) = numbered(shape_of(tensor_operands(node)[0])), result_shapes(node)
    return OpRule((dims,), (dims, dims if buffer == shape else private(buffer, "empty")))


@rule("aten::log_sigmoid_backward")
def _log_sigmoid_backward(node: Node) -> OpRule:
    shape, (*_, buffer) = shape_of(node), operand_shapes(node)
    dims = numbered(shape)
    own = dims if buffer == shape else private(buffer, "empty")
    return OpRule((dims, dims, own), (dims,), linear=FIRST_OPERAND)


@rule("aten::detach", "aten::alias", "aten::lift_fresh_copy")
def _same(node: Node) -> OpRule:
    dims = numbered(shape_of(node))
    return OpRule((dims,), (dims,), linear=FIRST_OPERAND)


@rule("aten::masked_fill")
def _masked_fill(node: Node) -> OpRule:
    shape = shape_of(node)
    dims = numbered(shape)
    operands = tuple(broadcast(shape_of(operand), dims, shape) for operand in tensor_operands(node))
    value = arguments(node)["value"]
    # Each rank would put in the value, and the sum would have it once per rank: only 0 works.
    is_zero = not isinstance(value, Node) and value == 0
    return OpRule(operands, (dims,), linear=FIRST_OPERAND if is_zero else ())
