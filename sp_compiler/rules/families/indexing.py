"""Rules of lookups, slices, joins and indices, and of their gradients."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.symbolic import is_open
from sp_compiler.rules.factors import (
    Dims,
    OpRule,
    Rows,
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


@rule("aten::embedding")
def _embedding(node: Node) -> OpRule:
    weight, ids = operand_shapes(node)
    by_frequency = arguments(node)["scale_grad_by_freq"]
    # Frequencies are counted over all tokens: a rank must not see only a part of them.
    dims = private(ids, "d") if by_frequency else numbered(ids)
    hidden = named(weight[1:], "h")
    return OpRule(((*private(weight[:1], "v"), *hidden), dims), ((*dims, *hidden),))


@rule("aten::embedding_dense_backward")
def _embedding_backward(node: Node) -> OpRule:
    grad, ids = (shape_of(operand) for operand in tensor_operands(node))
    by_frequency = arguments(node)["scale_grad_by_freq"]
    dims = private(ids, "d") if by_frequency else numbered(ids)
    hidden = named(grad[-1:], "h")
    tokens = tuple(factor for dim in dims for factor in dim)
    table = (*private(shape_of(node)[:1], "v"), *hidden)
    return OpRule(((*dims, *hidden), dims), (table,), contracted=tokens, linear=FIRST_OPERAND)


_LOOKUPS_OF_BAGS = (
    *("aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"),
    *("aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward"),
    "aten::_embedding_bag_per_sample_weights_backward",
)


@rule(*_LOOKUPS_OF_BAGS)
def _embedding_bag(node: Node) -> OpRule:
    """The width may be sharded; where a bag ends depends on data.

    Results of the lookup: the rows, two values per index or bag, and the entry that each row's
    largest element comes from. Of its backward: the gradient of the table, or of each entry's
    factor, which is a sum over the width.
    """
    args, results = arguments(node), result_shapes(node)
    is_backward = "grad" in args
    rows = shape_of(args["grad"]) if is_backward else results[0]
    hidden = named(rows[1:], "h")

    def of(shape: tuple[int, ...], owner: str) -> Dims:
        # Only the values with a width have two dims.
        return (*private(shape[:1], owner), *(hidden if len(shape) == 2 else ()))

    operands = tuple(of(shape, f"o{index}_") for index, shape in enumerate(operand_shapes(node)))
    made = tuple(of(shape, f"r{index}_") for index, shape in enumerate(results))
    summed = hidden[0] if len(results[0]) == 1 else ()
    if is_backward:
        return OpRule(operands, made, contracted=summed, linear=FIRST_OPERAND, rows="fixed")
    whole = tuple(index for index, shape in enumerate(results) if len(shape) == 1)
    return OpRule(operands, made, rows="fixed", whole=whole)


@rule("aten::slice", "aten::select", "aten::narrow", "aten::flip", "aten::roll")
def _slice(node: Node) -> OpRule | None:
    shapes, results = operand_shapes(node), result_shapes(node)
    shape, result, args = shapes[0], results[0], arguments(node)
    if len(shapes) != 1:
        return None  # bounds that are tensors
    dims_arg = args.get("dim", args.get("dims", 0))
    touched = {
        positive_dim(dim, len(shape))
        for dim in ([dims_arg] if isinstance(dims_arg, int) else dims_arg)
    }
    if node.target is aten.roll.default and not dims_arg:
        touched = set(range(len(shape)))  # it rolls the flattened tensor
    dims = numbered(shape, blocked=sorted(touched))
    dropped = touched if len(result) < len(shape) else set()
    kept = tuple(dim for position, dim in enumerate(dims) if position not in dropped)
    return OpRule((dims,), (kept,), linear=((0,),))


@rule(
    *("aten::slice_backward", "aten::select_backward"),
    local_arguments={"input_sizes": lambda call: list(call.result_shapes[0])},
)
def _slice_backward(node: Node) -> OpRule:
    shape, grad = shape_of(node), shape_of(tensor_operands(node)[0])
    dim = arguments(node)["dim"] % len(shape)
    dims = numbered(shape, blocked=(dim,))
    operand = dims if len(grad) == len(shape) else (*dims[:dim], *dims[dim + 1 :])
    return OpRule((operand,), (dims,), linear=FIRST_OPERAND)


@rule("aten::slice_scatter", "aten::select_scatter")
def _put(node: Node) -> OpRule:
    """A tensor with a part of it replaced by another."""
    (shape, part) = operand_shapes(node)
    dim = positive_dim(arguments(node)["dim"], len(shape))
    dims = numbered(shape, blocked=(dim,))
    own = private(part[dim : dim + 1], "p") if len(part) == len(shape) else ()
    return OpRule((dims, (*dims[:dim], *own, *dims[dim + 1 :])), (dims,), linear=((0, 1),))


@rule("aten::index_select")
def _index_select(node: Node) -> OpRule:
    """Rows of one dim by index; every other dim may be sharded."""
    shape, index = operand_shapes(node)
    dim = positive_dim(arguments(node)["dim"], len(shape))
    dims, numbers = numbered(shape, blocked=(dim,) if shape else ()), private(index, "i")
    # A 0-dim index selects as if it were a vector of one element.
    result = (*dims[:dim], *(numbers or ((),)), *dims[dim + 1 :]) if shape else ()
    return OpRule((dims, numbers), (result,), linear=FIRST_OPERAND, rows="fixed")


@rule("aten::index_add", "aten::index_copy")
def _index_add(node: Node) -> OpRule:
    """Jointly linear in the tensor and the rows that are added to some of its own, or replace
    them."""
    shape, index, source = operand_shapes(node)
    dim = positive_dim(arguments(node)["dim"], len(shape))
    dims, numbers = numbered(shape, blocked=(dim,) if shape else ()), private(index, "i")
    if len(source) < len(shape) or not shape:
        return OpRule((private(shape, "d"), numbers, private(source, "s")), (private(shape, "d"),))
    added = (*dims[:dim], *private(source[dim : dim + 1], "s"), *dims[dim + 1 :])
    return OpRule((dims, numbers, added), (dims,), linear=((0, 2),), rows="fixed")


@rule("aten::index_fill")
def _index_fill(node: Node) -> OpRule:
    shape, index, *number = operand_shapes(node)
    dim = positive_dim(arguments(node)["dim"], len(shape))
    dims = numbered(shape, blocked=(dim,) if shape else ())
    # Each rank would put in the value, and the sum would have it once per rank: only 0 works.
    linear = FIRST_OPERAND if arguments(node)["value"] == 0 else ()
    operands = (dims, private(index, "i"), *(private(each, "v") for each in number))
    return OpRule(operands, (dims,), linear=linear, rows="fixed")


@rule("aten::one_hot")
def _one_hot(node: Node) -> OpRule | None:
    if arguments(node)["num_classes"] == -1:
        return None  # the largest index determines the size, and a part may not contain it
    shape = shape_of(node)
    dims = numbered(shape, blocked=(len(shape) - 1,))
    return OpRule((dims[:-1],), (dims,))


@rule("aten::gather")
def _gather(node: Node) -> OpRule:
    dims = _aligned(node)
    return OpRule(dims, dims[1:], linear=FIRST_OPERAND)


@rule("aten::scatter", "aten::scatter_add", "aten::scatter_reduce")
def _scatter(node: Node) -> OpRule:
    """Jointly linear in the tensor and the values put or added into it."""
    target, *others = _aligned(node)
    given = arguments(node)
    linear: tuple[tuple[int, ...], ...] = ()
    if "reduce" not in given:
        # Each rank would put in a scalar, and the sum would have it once per rank: only 0 works.
        has_source = len(others) > 1
        linear = ((0, 2),) if has_source else FIRST_OPERAND if given["value"] == 0 else ()
    return OpRule((target, *others), (target,), linear=linear)


def _aligned(node: Node) -> tuple[Dims, ...]:
    """Dims of a tensor, of indices into its ``dim``, and of the values put there, if any; their
    other dims share factors if all are equal."""
    shape, *others = operand_shapes(node)
    dim = positive_dim(arguments(node)["dim"], len(shape))
    # A shorter dim of the index takes only the front of the tensor, and of longer values: parts of
    # them would not correspond.
    alike = [
        d for d in range(len(shape)) if d != dim and all(other[d] == shape[d] for other in others)
    ]
    dims = numbered(shape, blocked=[d for d in range(len(shape)) if d not in alike])
    # By their own number of dims: one index into a vector may be 0-dim.
    return dims, *(
        tuple(dims[d] if d in alike else own for d, own in enumerate(private(other, f"i{index}_")))
        for index, other in enumerate(others)
    )


def _local_split_sizes(call: LocalCall) -> list[int]:
    dim = call.arguments["dim"]
    return [shape[dim] for shape in call.result_shapes]


@rule("aten::unbind")
@rule("aten::split_with_sizes", local_arguments={"split_sizes": _local_split_sizes})
def _split(node: Node) -> OpRule:
    (shape,), results = operand_shapes(node), result_shapes(node)
    dim = positive_dim(arguments(node).get("dim", 0), len(shape))
    dims = numbered(shape, blocked=(dim,))
    if len(results[0]) < len(shape):  # unbind: each result lacks the dim
        result = tuple(item for position, item in enumerate(dims) if position != dim)
        return OpRule((dims,), (result,) * len(results), linear=((0,),))
    # If the dim were cut without regard to the parts, a rank would have only some of the results.
    sizes = tuple(result[dim] for result in results)
    return OpRule((dims,), (dims,) * len(results), linear=((0,),), split=(dim, sizes))


@rule("aten::cat", "aten::stack")
def _cat(node: Node) -> OpRule:
    """``cat`` ignores empty vectors, whatever the number of dims of the others."""
    shapes, (result,) = operand_shapes(node), result_shapes(node)
    dim = positive_dim(arguments(node).get("dim", 0), len(result))
    joined = numbered(result, blocked=(dim,))
    part = joined if node.target is aten.cat.default else (*joined[:dim], *joined[dim + 1 :])
    operands = tuple(private(s, "e") if s == (0,) else part for s in shapes)
    return OpRule(operands, (joined,), linear=(tuple(range(len(shapes))),))


@rule("aten::constant_pad_nd", "aten::pad")
def _pad(node: Node) -> OpRule:
    """Padding one side and cropping the other keeps the size but moves the elements."""
    (shape,), args = operand_shapes(node), arguments(node)
    # ``pad`` has pairs for the last dims, in reverse order.
    numbers = args["pad"]
    pairs = [numbers[index : index + 2] for index in range(0, len(numbers), 2)]
    is_constant = args.get("mode", "constant") == "constant"
    # Pairs of zeros often stand for dims that are not padded; the modes other than constant need a
    # pair for each of their dims.
    moved = [
        len(shape) - 1 - index
        for index, pair in enumerate(pairs)
        if not is_constant or any(is_open(number) or number != 0 for number in pair)
    ]
    dims = numbered(shape, blocked=moved)
    # Each rank would add a padding value other than 0 once.
    linear = () if args.get("value") else ((0,),)
    # Flattening to rows could leave fewer dims than pairs.
    rows: Rows = "leading" if len(moved) == len(pairs) else "fixed"
    return OpRule((dims,), (dims,), linear=linear, rows=rows)


@rule("aten::tril", "aten::triu")
def _triangle(node: Node) -> OpRule:
    shape = shape_of(node)
    dims = numbered(shape, blocked=(len(shape) - 2, len(shape) - 1))
    return OpRule((dims,), (dims,), linear=FIRST_OPERAND)


def _index_dims(node: Node, source: tuple[int, ...]) -> tuple[Dims, Dims, list[Dims]] | None:
    """Dims of the indexed tensor, of what is picked from it, and of each index tensor."""
    indices = arguments(node)["indices"]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    # If they are not adjacent, the picked dims come first, which is another order of the dims.
    adjacent = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    if (
        not adjacent
        or len(indices) > len(source)
        or any(index.meta["val"].dtype == torch.bool for index in indices if index)
    ):
        return None
    shapes = [shape_of(index) for index in indices if index is not None]
    picked_shape = tuple(torch.broadcast_shapes(*shapes))
    # Blocked: an index of a sharded dim would have to find the rank that has the row.
    picked = private(picked_shape, "p")
    indexed = numbered(source, blocked=dims)
    result = (*indexed[: dims[0]], *picked, *indexed[dims[-1] + 1 :])
    return indexed, result, [broadcast(shape, picked, picked_shape) for shape in shapes]


@rule("aten::index", "aten::_unsafe_index")
def _index(node: Node) -> OpRule | None:
    parts = _index_dims(node, shape_of(tensor_operands(node)[0]))
    if parts is None:
        return None
    source, result, indices = parts
    return OpRule((source, *indices), (result,), linear=FIRST_OPERAND, rows="fixed")


@rule("aten::index_put", "aten::_unsafe_index_put")
def _index_put(node: Node) -> OpRule | None:
    """Jointly linear in the tensor and the values if the values are added."""
    parts = _index_dims(node, shape_of(node))
    args = arguments(node)
    # If two values are put at one position without adding, the result depends on the order.
    if parts is None or not args["accumulate"]:
        return None
    target, result, indices = parts
    values = args["values"]
    put = broadcast(shape_of(values), result, _index_result_shape(node, shape_of(node)))
    last = len(indices) + 1
    return OpRule((target, *indices, put), (target,), linear=((0, last),), rows="fixed")


def _index_result_shape(node: Node, source: tuple[int, ...]) -> tuple[int, ...]:
    indices = arguments(node)["indices"]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    shapes = [shape_of(index) for index in indices if index is not None]
    return (*source[: dims[0]], *torch.broadcast_shapes(*shapes), *source[dims[-1] + 1 :])
