"""Rules of reductions."""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments
from sp_compiler.rules.factors import (
    Dims,
    OpRule,
    broadcast,
    numbered,
)
from sp_compiler.rules.families.elementwise import pointwise
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    operand_shapes,
    positive_dim,
    result_shapes,
    rule,
)


@rule("aten::logsumexp")
def _logsumexp(node: Node) -> OpRule | None:
    """Normalization leaves none with ``keepdim``, which the typing check would handle wrongly."""
    return None if arguments(node)["keepdim"] else _reduction(node)


@rule("aten::max", "aten::min")
def _extreme(node: Node) -> OpRule | None:
    """Elementwise over two tensors, or a reduction along one dim or all."""
    return pointwise(node) if "other" in arguments(node) else _reduction(node)


@rule(
    *("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::argmax", "aten::argmin"),
    *("aten::any", "aten::all", "aten::linalg_vector_norm", "aten::aminmax", "aten::prod"),
    *("aten::median", "aten::nanmedian", "aten::kthvalue", "aten::nansum", "aten::nanmean"),
    "aten::count_nonzero",
    *("aten::var", "aten::std", "aten::var_mean", "aten::std_mean"),
)
def _reduction(node: Node) -> OpRule | None:
    (shape,), results = operand_shapes(node), result_shapes(node)
    args = arguments(node)
    name = node.target._schema.name
    is_sum, is_mean = name == "aten::sum", name == "aten::mean"
    dims_arg = args.get("dim")
    dims_arg = [dims_arg] if isinstance(dims_arg, int) else dims_arg
    # torch accepts dims 0 and -1 for a 0-dim tensor.
    given = (dims_arg or range(len(shape))) if shape else ()
    reduced = {positive_dim(dim, len(shape)) for dim in given}
    # A dim of size 1 is blocked even in a sum: flattened to rows it would disappear.
    blocked = [dim for dim in sorted(reduced) if not (is_sum or is_mean) or shape[dim] == 1]
    dims = numbered(shape, blocked=blocked)
    keep = bool(args.get("keepdim", False))
    result: Dims = tuple(
        () if dim in reduced else factors
        for dim, factors in enumerate(dims)
        if keep or dim not in reduced
    )
    # Maxima, norms or variances of parts do not add up: those dims are blocked above.
    gone = tuple(f for dim in sorted(reduced) for f in dims[dim] if not f.blocked)
    # In float16 a sum may overflow where the mean, which accumulates in float32, does not.
    may_sum = is_mean and node.meta["val"].dtype != torch.float16
    return OpRule(
        (dims,),
        (result,) * len(results),
        contracted=gone if is_sum else (),
        averaged=gone if may_sum else (),
        linear=FIRST_OPERAND if is_sum or is_mean else (),
    )


@rule("aten::cosine_similarity")
def _cosine_similarity(node: Node) -> OpRule | None:
    """Similarity along one dim, which stays whole: it is divided by norms over the entire dim."""
    shapes = operand_shapes(node)
    whole = tuple(torch.broadcast_shapes(*shapes))
    dim = positive_dim(arguments(node)["dim"], len(whole))
    dims = numbered(whole, blocked=(dim,) if whole else ())
    operands = tuple(broadcast(shape, dims, whole) for shape in shapes)
    return OpRule(operands, ((*dims[:dim], *dims[dim + 1 :]),), rows="fixed")
