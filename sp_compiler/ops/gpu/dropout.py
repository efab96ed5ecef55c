"""Dropout as one Triton kernel, for generated code that runs uncompiled on a GPU.

Operator by operator, a mask takes two dozen passes over memory, longer than the matmuls of a layer.
The kernel draws the bits of :class:`~sp_compiler.ops.counter.Grid`. Inductor does not need it,
because it fuses the operators themselves.
"""

# No postponed annotations: Triton reads those of a kernel's parameters as they are.
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from sp_compiler.ops.counter import mix64_number

# Elements per program. The key of a row costs about as much as two of its elements.
_BLOCK = 4096
_MAX_COLUMNS = 1024


def run_dropout(  # noqa: PLR0913 - those of the operator
    x: Tensor,
    result: Tensor,
    seed: Tensor,
    threshold: int,
    scale: float,
    site: int,
    dim: int,
    world_size: int,
    rank: int,
    first_row: int,
    padding: int,
    first_query: int,
    num_queries: int,
) -> None:
    """Write dropout of ``x``, or its mask if ``result`` is bool, to ``result``.

    Args:
        x: contiguous.
        result: contiguous, of the same shape.
        seed: 0-dim int64.
        threshold: the smallest bits that survive.
        scale: factor for what survives.
        site: this and all others as for :class:`~sp_compiler.ops.counter.Grid`.
    """
    if not x.numel():
        return
    *leading, num_columns = tuple(x.shape) or (1,)
    sizes = [*leading[:-1], num_queries] if num_queries else leading  # of the rank's tensor
    dim %= max(1, x.dim())
    first_column = inner = true_inner = 0
    global_columns = num_columns
    if world_size > 1 and dim == len(leading):
        first_column, global_columns = rank * num_columns, world_size * num_columns
    elif world_size > 1:
        inner = prod(sizes[dim:])
        true_inner = inner * world_size - padding * prod(sizes[dim + 1 :])
    num_rows = prod(leading)
    columns = min(triton.next_power_of_2(num_columns), _MAX_COLUMNS)
    rows = _BLOCK // columns
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(x):
        _dropout[programs,](
            x, result, seed.to(x.device), num_rows, num_columns,
            leading[-1] if num_queries else 1, num_queries, first_query,
            inner, true_inner, rank * inner, first_row, first_column,
            mix64_number(site), threshold,
            SCALE=scale, IS_MASK=result.dtype == torch.bool, IS_WIDE=global_columns > 1 << 32,
            HAS_QUERIES=num_queries > 0, HAS_INNER=inner > 0, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip


@triton.jit
def _mix64(x):
    """The finaliser of SplitMix64, as in :mod:`~sp_compiler.ops.counter`."""
    x += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


# All integers but the number of columns: specializing on 1 and on multiples of 16 would gain
# nothing. For columns it shows that a thread may load several elements at once.
@triton.jit(
    do_not_specialize=[
        *("num_rows", "queries", "num_queries", "first_query", "inner", "true_inner"),
        *("first_inner", "first_row", "first_column", "site", "threshold"),
    ]
)
def _dropout(  # noqa: PLR0913
    x, result, seed, num_rows, num_columns, queries, num_queries, first_query,
    inner, true_inner, first_inner, first_row, first_column, site, threshold,
    SCALE: tl.constexpr, IS_MASK: tl.constexpr, IS_WIDE: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draw and apply a block of ``ROWS`` x ``COLUMNS`` elements."""
    num_columns = tl.cast(num_columns, tl.int64)
    blocks_of_row = (num_columns + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64)
    rows = program // blocks_of_row * ROWS + tl.arange(0, ROWS)
    columns = program % blocks_of_row * COLUMNS + tl.arange(0, COLUMNS)

    # Rows of the global tensor.
    global_rows = rows
    if HAS_QUERIES:
        global_rows = global_rows // queries * num_queries + global_rows % queries + first_query
    if HAS_INNER:
        global_rows = global_rows // inner * true_inner + global_rows % inner + first_inner
    global_rows += first_row
    key = _mix64(tl.load(seed).to(tl.uint64, bitcast=True))
    key = _mix64(key + site.to(tl.int64).to(tl.uint64, bitcast=True))
    keys = _mix64(
        key + global_rows.to(tl.uint64, bitcast=True) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    )

    global_columns = columns + first_column
    bits = keys.to(tl.uint32)[:, None] ^ global_columns.to(tl.uint32)[None, :]
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x21F0AAAD, tl.uint32)
    bits = bits ^ (bits >> 15) ^ (keys >> 32).to(tl.uint32)[:, None]
    second = tl.full((), 0xD35A2D97, tl.uint32)
    if IS_WIDE:
        bits ^= ((global_columns >> 32).to(tl.uint32) * second)[None, :]
    bits *= second
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x21F0AAAD, tl.uint32)
    survives = bits.to(tl.int32, bitcast=True) >= threshold

    is_inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows[:, None] * num_columns + columns[None, :]
    if IS_MASK:
        tl.store(result + places, survives, is_inside)
    else:
        value = tl.load(x + places, is_inside)
        # A multiplication, because a dropped infinity must become NaN.
        kept = value * survives.to(value.dtype)
        if value.dtype == tl.float64:
            scaled = kept * tl.full((), SCALE, tl.float64)
        else:
            scaled = kept.to(tl.float32) * tl.full((), SCALE, tl.float32)
        tl.store(result + places, scaled.to(value.dtype), is_inside)
