"""Rules of operators that only relabel elements. All are linear."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments
from sp_compiler.rules.factors import (
    Factor,
    OpRule,
    Rows,
    broadcast,
    numbered,
    private,
    reshaped,
)
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    LocalCall,
    operand_shapes,
    result_shapes,
    rule,
)

aten = torch.ops.aten


def _of_a_part(call: LocalCall) -> bool:
    return call.results[0].is_sharded


def _of_rows(call: LocalCall) -> bool:
    """A dim of a part in rows form has a different position than in the unsharded tensor."""
    return call.results[0].kind == "T"


# Their arguments name sizes, or they drop dims of size 1, which may be other dims on one rank.
@rule(
    *("aten::reshape", "aten::view", "aten::_unsafe_view", "aten::flatten", "aten::unflatten"),
    "aten::squeeze",
    is_reshape=_of_a_part,
)
@rule("aten::unsqueeze", is_reshape=_of_rows)
def reshape(node: Node) -> OpRule | None:
    if node.target is aten.view.dtype:
        return None  # reinterprets the bits, perhaps with another element size
    (shape,), (result,) = operand_shapes(node), result_shapes(node)
    if 0 in shape:
        return None  # sizes do not determine how the dims correspond
    operand_dims, result_dims = reshaped(shape, result)
    return OpRule((operand_dims,), (result_dims,), linear=((0,),), rows="relabel")


def _moves_a_row_dim(call: LocalCall) -> bool:
    """Return whether a row dim of size 1 is moved, which a part in rows form does not have."""
    placement = call.results[0]
    if placement.kind != "T":
        return False
    # A part has one dim in place of several token dims: the others do not exist to be moved.
    rank = len(result_shapes(call.node)[0])
    rows = max(placement.dim, call.operands[0].dim)
    return any(dim % rank < rows for dim in call.node.args[1:])


@rule("aten::t", "aten::permute", "aten::movedim", "aten::numpy_T")
@rule("aten::transpose", is_reshape=_moves_a_row_dim)
def _permute(node: Node) -> OpRule:
    (shape,) = operand_shapes(node)
    order = permutation(node, len(shape))
    dims = numbered(shape)
    result = tuple(dims[dim] for dim in order)
    rows: Rows = "relabel" if node.target is aten.transpose.int else "fixed"
    return OpRule((dims,), (result,), linear=((0,),), rows=rows)


def permutation(node: Node, rank: int) -> list[int]:
    """Source dim of each result dim, found by permuting a shape whose sizes are all distinct."""
    # By running the operator itself: overloads have different arguments for the order.
    probe = torch.empty(tuple(range(1, rank + 1)), device="meta")
    result = node.target(probe, *node.args[1:], **node.kwargs)
    return [size - 1 for size in result.shape]


@rule("aten::view_as_real", "aten::view_as_complex")
def _complex_view(node: Node) -> OpRule:
    """The real and imaginary parts of a number are never separated."""
    shapes = [*operand_shapes(node), *result_shapes(node)]
    dims = numbered(min(shapes, key=len))
    operand, result = (
        dims if len(shape) == len(dims) else (*dims, *private(shape[-1:], "c")) for shape in shapes
    )
    return OpRule((operand,), (result,), linear=((0,),))


@rule("aten::expand", local_arguments={"size": lambda call: list(call.result_shapes[0])})
def _expand(node: Node) -> OpRule:
    (shape,), (result,) = operand_shapes(node), result_shapes(node)
    # A dim that is expanded has no factor in the operand: if cut, each rank makes its own copies.
    dims = numbered(result)
    return OpRule((broadcast(shape, dims, result),), (dims,), linear=((0,),))


@rule("aten::pixel_shuffle", "aten::pixel_unshuffle")
def _pixel_shuffle(node: Node) -> OpRule:
    """``(c r r) h w -> c (h r) (w r)`` and back; parts of r x r blocks do not match image parts."""
    (shape,), (result,), args = operand_shapes(node), result_shapes(node), arguments(node)
    is_shuffle = "upscale_factor" in args
    ratio = args["upscale_factor"] if is_shuffle else args["downscale_factor"]
    *batch, channels, height, width = result if is_shuffle else shape
    outer = ("c", channels), ("h", height // ratio), ("w", width // ratio)
    c, h, w = ((Factor(name, size),) if size != 1 else () for name, size in outer)
    rows, columns = ((Factor(name, ratio, True),) if ratio != 1 else () for name in "rs")
    images = numbered(batch)
    blocks = (*images, (*c, *rows, *columns), h, w)
    pixels = (*images, c, (*h, *rows), (*w, *columns))
    operand, produced = (blocks, pixels) if is_shuffle else (pixels, blocks)
    return OpRule((operand,), (produced,), linear=FIRST_OPERAND, rows="fixed")
