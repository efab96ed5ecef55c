"""Rules of Fourier transforms."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.ir.fx import arguments
from sp_compiler.rules.factors import OpRule, Rows, numbered, private
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    operand_shapes,
    positive_dim,
    result_shapes,
    rule,
    schema_name,
)

PRIMITIVES = ("aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c")
"""The operators that the others become in a joint graph. They count dims only from the front."""
TRANSFORMS = (
    *(f"aten::fft_{name}" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")),
    *(f"aten::fft_{name}" for name in ("fft2", "ifft2", "rfft2", "irfft2")),
    *(f"aten::fft_{name}" for name in ("fftn", "ifftn", "rfftn", "irfftn")),
)


@rule(*TRANSFORMS, *PRIMITIVES)
def _transform(node: Node) -> OpRule:
    """Every dim that is not transformed may be sharded; a transformed one may change its size."""
    (shape,), (result,) = operand_shapes(node), result_shapes(node)
    args = arguments(node)
    dims_arg, rank = args["dim"], len(shape)
    if dims_arg is None:  # the last dims, as many as ``s`` has sizes
        dims_arg = range(-len(args["s"] or shape), 0)
    given = [dims_arg] if isinstance(dims_arg, int) else dims_arg
    transformed = {positive_dim(dim, rank) for dim in given}
    dims, changed = numbered(shape, blocked=sorted(transformed)), private(result, "r")
    after = tuple(changed[dim] if dim in transformed else dims[dim] for dim in range(rank))
    rows: Rows = "fixed" if schema_name(node) in PRIMITIVES else "leading"
    return OpRule((dims,), (after,), linear=FIRST_OPERAND, rows=rows)
