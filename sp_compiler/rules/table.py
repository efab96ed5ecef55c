"""The rule table: ATen operator to :class:`~sp_compiler.rules.factors.OpRule`.

A rule reads shapes and constant arguments only. An operator without a rule runs replicated; so does
any strategy that a rule leaves out: a missing rule costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.rules.factors import (
    Dim,
    Dims,
    Factor,
    OpRule,
    Rows,
    broadcast,
    named,
    numbered,
    private,
    record_cuts,
    reshaped,
)
from sp_compiler.trace.autograd_functions import is_pointwise_function

Rule = Callable[[Node], OpRule | None]
_TABLE: dict[str, Rule] = {}
_FIRST = ((0,),)
aten = torch.ops.aten


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for every overload of the named ATen operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in _TABLE, f"{name} has two rules"
            _TABLE[name] = function
        return function

    return register


def rule_for(node: Node) -> OpRule | None:
    """The factors of ``node``, or ``None``: it must run replicated."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found = _TABLE.get(target._schema.name)
    if found is not None:
        return found(node)
    return _pointwise(node) if torch.Tag.pointwise in target.tags else None


def has_rule(node: Node) -> bool:
    """Whether the table knows the operator; its rule may still leave it whole."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.name in _TABLE or torch.Tag.pointwise in target.tags


def is_pointwise(node: Node) -> bool:
    """Whether operands of ``node`` are broadcast to its result and combined element by element."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return _TABLE.get(target._schema.name) is _pointwise or torch.Tag.pointwise in target.tags


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.meta["val"].shape)


def _operand_shapes(node: Node) -> list[tuple[int, ...]]:
    return [_shape(operand) for operand in tensor_operands(node)]


def _result_shapes(node: Node) -> list[tuple[int, ...]]:
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tuple(item.shape) for item in values]


def _positive(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


# Pointwise operators. ``_LINEAR`` says in which sets of operands they are jointly linear.

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
    if name == "mul":
        return tuple((position,) for position in range(count))
    if name == "div" and not arguments(node).get("rounding_mode"):
        return ((0,),)
    if name == "where" and count == 3:
        return ((1, 2),)
    if name in _UNARY_LINEAR and _keeps_floating(node):
        return ((0,),)
    return ()


def _keeps_floating(node: Node) -> bool:
    operand, result = tensor_operands(node)[0].meta["val"], node.meta["val"]
    return bool(operand.dtype.is_floating_point and result.dtype.is_floating_point)


def _pointwise(node: Node) -> OpRule | None:
    shapes, results = _operand_shapes(node), _result_shapes(node)
    if len(results) != 1:
        return None
    dims = numbered(results[0])
    operands = tuple(broadcast(shape, dims, results[0]) for shape in shapes)
    linear = _linear_sets(node, len(shapes))
    return OpRule(operands, (dims,), linear=linear, rows="broadcast")


for _name in (
    *("clone", "contiguous", "_to_copy", "to", "native_dropout_backward", "where"),
    *("log_sigmoid", "floor_divide"),
):
    _TABLE[f"aten::{_name}"] = _pointwise


@rule("sp_compiler::dropout", "sp_compiler::dropout_mask")
def _dropout(node: Node) -> OpRule:
    (shape,) = _result_shapes(node)
    dims = numbered(shape)
    linear = ((0,),) if node.target is torch.ops.sp_compiler.dropout.default else ()
    return OpRule((dims, ()), (dims,), linear=linear, rows="broadcast", placed=True)


@rule("sp_compiler_function::apply")
def _autograd_function(node: Node) -> OpRule | None:
    shapes, results = _operand_shapes(node), _result_shapes(node)
    dtypes = tuple(operand.meta["val"].dtype for operand in tensor_operands(node))
    if len({*shapes, *results}) != 1 or not is_pointwise_function(
        arguments(node)["call"], len(shapes[0]), dtypes
    ):
        return None
    dims = numbered(shapes[0])
    return OpRule((dims,) * len(shapes), (dims,) * len(results), rows="broadcast")


# Products.


@rule("aten::linear")
def _linear(node: Node) -> OpRule | None:
    """With a bias the inner dim cannot be sharded: every rank would add the bias."""
    x, weight, *bias = _operand_shapes(node)
    if len(weight) != 2:
        return None
    dims = (*numbered(x[:-1]), *named(weight[1:], "i"))
    out, inner = Factor("o", weight[0]), Factor("i", weight[1])
    operands: tuple[Dims, ...] = (dims, ((out,), (inner,)))
    results = ((*dims[:-1], (out,)),)
    if bias:
        return OpRule((*operands, ((out,),)), results, linear=((0, 2), (1, 2)))
    return OpRule(operands, results, contracted=(inner,), linear=((0,), (1,)))


@rule("aten::mm", "aten::bmm", "aten::matmul")
def _matmul(node: Node) -> OpRule | None:
    left, right = _operand_shapes(node)
    if len(left) < 2 or len(right) < 2:
        return None
    (result,) = _result_shapes(node)
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
        rows="leading" if len(right) == 2 else "fixed",
    )


@rule("aten::baddbmm")
def _baddbmm(node: Node) -> OpRule:
    bias, left, _right = _operand_shapes(node)
    (result,) = _result_shapes(node)
    dims = named(result, "bmn")
    inner = Factor("k", left[-1])
    operands = (
        broadcast(bias, dims, result),
        (dims[0], dims[1], (inner,)),
        (dims[0], (inner,), dims[2]),
    )
    return OpRule(operands, (dims,), rows="fixed")


@rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_mm(node: Node) -> OpRule | None:
    """Rows sorted by expert times a matrix an expert: ``(s, k) @ (e, k, n) -> (s, n)``.

    And the gradient of those matrices, ``(k, s) @ (s, n) -> (e, k, n)``. The experts themselves are
    not cut: which rows belong to one depends on the numbers.
    """
    shapes = _operand_shapes(node)
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
    s, e = private(rows[:1], "s")[0], private(weight[:1], "e")[0]
    operands = ((s, (inner,)), (e, (inner,), (out,)), (e,))
    return OpRule(operands, ((s, (out,)),), contracted=(inner,), linear=((0,), (1,)), rows="fixed")


@rule("transformers::grouped_mm_fallback_backward")
def _grouped_mm_backward(node: Node) -> OpRule:
    """Results: the gradients of rows and weights, of which a cut dim makes one partial."""
    rows, weight, _, _ = _operand_shapes(node)
    inner, out = Factor("k", rows[1]), Factor("n", weight[2])
    s, e = private(rows[:1], "s")[0], private(weight[:1], "e")[0]
    grad_rows, grad_weight = (s, (inner,)), (e, (inner,), (out,))
    operands = (grad_rows, grad_weight, (e,), (s, (out,)))
    results = (grad_rows, grad_weight)
    return OpRule(operands, results, contracted=(out,), linear=((3,),), rows="fixed")


@rule("aten::convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d")
def _convolution(node: Node) -> OpRule | None:
    """Output channels may be sharded, or, where channels are in groups, the groups."""
    shapes, (result,) = _operand_shapes(node), _result_shapes(node)
    if arguments(node).get("transposed", False) or len(result) != len(shapes[1]):
        return None
    batch = named(shapes[0][:1], "b")
    channels, out = convolution_channels(shapes[0], shapes[1])
    operands: tuple[Dims, ...] = (
        (*batch, channels, *private(shapes[0][2:], "x")),
        (out, *private(shapes[1][1:], "w")),
    )
    if len(shapes) == 3:
        operands += ((out,),)
    return OpRule(operands, ((*batch, out, *private(result[2:], "y")),), rows="fixed")


def convolution_channels(image: Sequence[int], weight: Sequence[int]) -> tuple[Dim, Dim]:
    """Factors of the channels of a convolution's input and output.

    The number of groups follows from the shapes; that among the arguments may be one rank's.
    """
    groups = image[1] // weight[1]
    if groups == 1:
        return private(image[1:2], "c")[0], (Factor("o", weight[0]),)
    inner = private((weight[1],), "c")[0]
    outer = private((weight[0] // groups,), "o")[0]
    return (Factor("g", groups), *inner), (Factor("g", groups), *outer)


@rule("aten::scaled_dot_product_attention")
def _sdpa(node: Node) -> OpRule | None:
    shapes = _operand_shapes(node)
    query, key, value = shapes[:3]
    if len(query) != 4 or len(key) != 4 or query[0] != key[0]:
        return None
    # The heads factor of grouped keys and values has another size; both divide or neither is cut.
    batch = named(query[:1], "b")[0]
    heads = Factor("a", query[1])
    kv_heads = heads if key[1] == query[1] else Factor("a", key[1])
    if value[1] != key[1]:
        return None
    q_dims: Dims = (batch, (heads,), *private(query[2:], "q"))
    operands = [q_dims]
    operands += [(batch, (kv_heads,), *private(shape[2:], "kv")) for shape in (key, value)]
    scores = (*query[:3], key[2])
    operands += [
        broadcast(mask, (*q_dims[:2], *private(scores[2:], "s")), scores) for mask in shapes[3:]
    ]
    return OpRule(tuple(operands), (q_dims,), linear=((2,),), rows="fixed")


@rule("aten::embedding")
def _embedding(node: Node) -> OpRule:
    weight, ids = _operand_shapes(node)
    by_frequency = arguments(node)["scale_grad_by_freq"]
    dims = private(ids, "d") if by_frequency else numbered(ids)
    hidden = named(weight[1:], "h")
    return OpRule(((*private(weight[:1], "v"), *hidden), dims), ((*dims, *hidden),))


# Row-wise operators and reductions.


@rule("aten::layer_norm", "aten::rms_norm")
def _layer_norm(node: Node) -> OpRule | None:
    shapes, results = _operand_shapes(node), _result_shapes(node)
    if len(results) != 1:
        return None
    normalized = len(arguments(node)["normalized_shape"])
    rank = len(shapes[0])
    dims = numbered(shapes[0], blocked=range(rank - normalized, rank))
    affine = tuple(broadcast(shape, dims, shapes[0]) for shape in shapes[1:])
    return OpRule((dims, *affine), (dims,))


@rule(
    *("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", "aten::cumsum"),
    *("aten::topk", "aten::sort"),
)
def _softmax(node: Node) -> OpRule:
    """Whatever happens along one dim, which may get another size, happens for each row alone."""
    (shape,) = _operand_shapes(node)
    dim = _positive(arguments(node)["dim"], len(shape))
    dims = numbered(shape, blocked=(dim,))
    results = tuple(
        (*dims[:dim], *private(result[dim : dim + 1], "r"), *dims[dim + 1 :])
        for result in _result_shapes(node)
    )
    return OpRule((dims,), results, linear=_FIRST if "cumsum" in str(node.target) else ())


@rule("aten::max", "aten::min")
def _extreme(node: Node) -> OpRule | None:
    """Of two tensors, or along one dim or all."""
    return _pointwise(node) if "other" in arguments(node) else _reduction(node)


@rule(
    "aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::linalg_vector_norm", "aten::var"
)
def _reduction(node: Node) -> OpRule | None:
    (shape,), results = _operand_shapes(node), _result_shapes(node)
    args = arguments(node)
    name = node.target._schema.name
    is_sum, is_mean = name == "aten::sum", name == "aten::mean"
    dims_arg = args.get("dim")
    dims_arg = [dims_arg] if isinstance(dims_arg, int) else dims_arg
    reduced = {_positive(dim, len(shape)) for dim in dims_arg or range(len(shape))}
    # A dim of size 1 is blocked even in a sum: flattened to rows it would be gone.
    blocked = [dim for dim in sorted(reduced) if not (is_sum or is_mean) or shape[dim] == 1]
    dims = numbered(shape, blocked=blocked)
    keep = bool(args.get("keepdim", False))
    result: Dims = tuple(
        () if dim in reduced else factors
        for dim, factors in enumerate(dims)
        if keep or dim not in reduced
    )
    gone = tuple(f for dim in sorted(reduced) for f in dims[dim] if not f.blocked)
    # A mean adds up in float32 what would overflow as a sum.
    may_sum = is_mean and node.meta["val"].dtype != torch.float16
    return OpRule(
        (dims,),
        (result,) * len(results),
        contracted=gone if is_sum else (),
        averaged=gone if may_sum else (),
        linear=_FIRST if is_sum or is_mean else (),
    )


# Views and rearrangements. All are linear.


def record_factors(node: Node) -> None:
    """Compare the open sizes of ``node`` as its rule did those of the example, so that calls for
    which they compare otherwise are told apart."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    if _TABLE.get(name) in (_reshape, _squeeze):
        record_cuts(*_operand_shapes(node), *_result_shapes(node))
    else:
        rule_for(node)


@rule("aten::reshape", "aten::view", "aten::_unsafe_view", "aten::flatten", "aten::unflatten")
def _reshape(node: Node) -> OpRule | None:
    if node.target is aten.view.dtype:
        return None  # other bits, perhaps of another size
    (shape,), (result,) = _operand_shapes(node), _result_shapes(node)
    if 0 in shape:
        return None  # sizes do not tell which dim became which
    operand_dims, result_dims = reshaped(shape, result)
    return OpRule((operand_dims,), (result_dims,), linear=((0,),), rows="relabel")


@rule("aten::transpose", "aten::t", "aten::permute", "aten::movedim", "aten::numpy_T")
def _permute(node: Node) -> OpRule:
    (shape,) = _operand_shapes(node)
    order = permutation(node, len(shape))
    dims = numbered(shape)
    result = tuple(dims[dim] for dim in order)
    rows: Rows = "relabel" if node.target is aten.transpose.int else "fixed"
    return OpRule((dims,), (result,), linear=((0,),), rows=rows)


def permutation(node: Node, rank: int) -> list[int]:
    """Source dim of each result dim, found by permuting a shape whose sizes are all distinct."""
    probe = torch.empty(tuple(range(1, rank + 1)), device="meta")
    result = node.target(probe, *node.args[1:], **node.kwargs)
    return [size - 1 for size in result.shape]


@rule("aten::unsqueeze", "aten::squeeze")
def _squeeze(node: Node) -> OpRule | None:
    return _reshape(node)


@rule("aten::view_as_real", "aten::view_as_complex")
def _complex_view(node: Node) -> OpRule:
    """Real and imaginary part of a number are never apart."""
    shapes = [*_operand_shapes(node), *_result_shapes(node)]
    dims = numbered(min(shapes, key=len))
    operand, result = (
        dims if len(shape) == len(dims) else (*dims, *private(shape[-1:], "c")) for shape in shapes
    )
    return OpRule((operand,), (result,), linear=((0,),))


@rule("aten::expand")
def _expand(node: Node) -> OpRule:
    (shape,), (result,) = _operand_shapes(node), _result_shapes(node)
    dims = numbered(result)
    return OpRule((broadcast(shape, dims, result),), (dims,), linear=((0,),))


@rule(
    "aten::slice", "aten::select", "aten::index_select", "aten::narrow", "aten::flip", "aten::roll"
)
def _slice(node: Node) -> OpRule | None:
    shapes, results = _operand_shapes(node), _result_shapes(node)
    shape, result, args = shapes[0], results[0], arguments(node)
    if len(shapes) != 1:
        return None
    dims_arg = args.get("dim", args.get("dims", 0))
    touched = {
        _positive(dim, len(shape))
        for dim in ([dims_arg] if isinstance(dims_arg, int) else dims_arg)
    }
    if node.target is aten.roll.default and not dims_arg:
        touched = set(range(len(shape)))  # it rolls the flattened tensor
    dims = numbered(shape, blocked=sorted(touched))
    dropped = touched if len(result) < len(shape) else set()
    kept = tuple(dim for position, dim in enumerate(dims) if position not in dropped)
    return OpRule((dims,), (kept,), linear=((0,),))


@rule("aten::slice_scatter", "aten::select_scatter")
def _put(node: Node) -> OpRule:
    """One tensor with a part of it replaced by another."""
    (shape, part) = _operand_shapes(node)
    dim = _positive(arguments(node)["dim"], len(shape))
    whole = numbered(shape, blocked=(dim,))
    own = private(part[dim : dim + 1], "p") if len(part) == len(shape) else ()
    return OpRule((whole, (*whole[:dim], *own, *whole[dim + 1 :])), (whole,), linear=((0, 1),))


@rule("aten::gather")
def _gather(node: Node) -> OpRule:
    shape, index = _operand_shapes(node)
    dims = _aligned(shape, index, _positive(arguments(node)["dim"], len(shape)))
    return OpRule(dims, dims[1:], linear=_FIRST)


@rule("aten::scatter", "aten::scatter_add")
def _scatter(node: Node) -> OpRule:
    """Linear in the tensor and what is put or added into it together."""
    shape, index, *source = _operand_shapes(node)
    whole, part = _aligned(shape, index, _positive(arguments(node)["dim"], len(shape)))
    same = [part if shape == index else private(shape, "s") for shape in source]
    linear = ((0, 2),) if source and "reduce" not in arguments(node) else ()
    return OpRule((whole, part, *same), (whole,), linear=linear)


def _aligned(shape: tuple[int, ...], index: tuple[int, ...], dim: int) -> tuple[Dims, Dims]:
    """Dims of a tensor and of indices into its ``dim``; the others go together if alike."""
    alike = [d for d in range(len(shape)) if d != dim and shape[d] == index[d]]
    blocked = [d for d in range(len(shape)) if d not in alike]
    whole, own = numbered(shape, blocked=blocked), private(index, "i")
    return whole, tuple(whole[d] if d in alike else own[d] for d in range(len(shape)))


@rule("aten::split_with_sizes", "aten::unbind")
def _split(node: Node) -> OpRule:
    (shape,), results = _operand_shapes(node), _result_shapes(node)
    dim = _positive(arguments(node).get("dim", 0), len(shape))
    dims = numbered(shape, blocked=(dim,))
    if len(results[0]) < len(shape):
        result = tuple(item for position, item in enumerate(dims) if position != dim)
        return OpRule((dims,), (result,) * len(results), linear=((0,),))
    sizes = tuple(result[dim] for result in results)
    return OpRule((dims,), (dims,) * len(results), linear=((0,),), split=(dim, sizes))


@rule("aten::cat", "aten::stack")
def _cat(node: Node) -> OpRule:
    """``cat`` passes over empty vectors, whatever the rank of the others."""
    shapes, (result,) = _operand_shapes(node), _result_shapes(node)
    dim = _positive(arguments(node).get("dim", 0), len(result))
    whole = numbered(result, blocked=(dim,))
    part = whole if node.target is aten.cat.default else (*whole[:dim], *whole[dim + 1 :])
    operands = tuple(private(s, "e") if s == (0,) else part for s in shapes)
    everything = tuple(range(len(shapes)))
    return OpRule(operands, (whole,), linear=(everything,))


@rule("aten::constant_pad_nd", "aten::pad")
def _pad(node: Node) -> OpRule:
    """What is cut from one side and added to the other keeps its size and yet moves."""
    (shape,) = _operand_shapes(node)
    pairs = len(arguments(node)["pad"]) // 2
    dims = numbered(shape, blocked=range(len(shape) - pairs, len(shape)))
    linear = () if arguments(node).get("value") else ((0,),)
    return OpRule((dims,), (dims,), linear=linear)
