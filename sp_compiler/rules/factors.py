"""Factors of an operator: the indices of the dims of its operands and results.

As in an einsum, a factor is an index that runs over operands and results. A dimension is a product
of factors, outermost first (``(a d)`` for a fused heads dimension), so views are rules like any
others. All strategies are derived mechanically from a rule, see
:mod:`sp_compiler.rules.strategies`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sp_compiler.ir.reshapes import common_factors, matching_spans
from sp_compiler.ir.symbolic import example_number, is_open


@dataclass(frozen=True)
class Factor:
    """One index of an operator: a name unique within its rule, and its global size.

    ``blocked``: the operator mixes or rearranges elements along it, so it cannot be sharded.
    """

    name: str
    size: int
    blocked: bool = False


Dim = tuple[Factor, ...]
"""Factors of one dimension, outermost first; empty if its size is 1."""

Dims = tuple[Dim, ...]

Rows = Literal["leading", "broadcast", "relabel", "fixed"]
"""Leading dims of an operand and of a result that may be flattened together.

``leading``: the same number of both. ``broadcast``: all but the same number of trailing ones.
``relabel``: any, because only the shape changes. ``fixed``: a single one, which stays as it is: the
operator accepts only one number of dims, or counts dims from the front.
"""


@dataclass(frozen=True)
class OpRule:
    """Factors of one operator.

    Attributes:
        operands: dims of each tensor operand, in the order of the arguments, repeats included.
        results: dims of each tensor result.
        contracted: factors that are summed over: sharding one makes the results without it partial.
        averaged: factors over which a mean is taken: they may be sharded as a sum that is divided
            afterwards.
        linear: sets of operand positions; when all operands of a set are partial sums and the
            others replicated, the results are partial sums.
        split: for an operator that cuts one dim into parts, (operand dim, part sizes): with each
            part sharded as a segment, all results are sharded on that dim.
        placed: whether the operator gets its position in the global tensor as arguments: the
            sharded dim and the number of ranks. It then supports no segments, and rows exclude the
            last dim.
        rows: how leading dims may be flattened to rows of tokens; see :data:`Rows`.
        whole: positions of results that are the same on all ranks, whatever operand is sharded. Not
            with ``linear``.
        segmented: whether a dim may be sharded in segments or with padding; not if the typings of
            one of our operators name only the dim.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    contracted: tuple[Factor, ...] = ()
    averaged: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    split: tuple[int, tuple[int, ...]] | None = None
    placed: bool = False
    rows: Rows = "leading"
    whole: tuple[int, ...] = ()
    segmented: bool = True


def named(shape: Sequence[int], names: str) -> Dims:
    """One factor per dim, named by ``names``, one letter per dim."""
    # A size of 1 gets no factor: it cannot be cut, and if broadcast, it is not an index of others.
    return tuple(
        () if size == 1 else (Factor(name, size),) for size, name in zip(shape, names, strict=True)
    )


def numbered(shape: Sequence[int], blocked: Sequence[int] = ()) -> Dims:
    """One factor per dim, named by its position; those in ``blocked`` cannot be sharded.

    A blocked dim has a factor even if its size is 1: it must not become part of the rows.
    """
    return tuple(
        () if size == 1 and dim not in blocked else (Factor(f"d{dim}", size, dim in blocked),)
        for dim, size in enumerate(shape)
    )


def private(shape: Sequence[int], owner: str) -> Dims:
    """Blocked factors that occur only in this tensor."""
    return tuple(
        () if size == 1 else (Factor(f"{owner}{dim}", size, True),)
        for dim, size in enumerate(shape)
    )


def broadcast(shape: Sequence[int], result: Dims, result_shape: Sequence[int]) -> Dims:
    """Dims of an operand of ``shape`` that is broadcast, aligned from the right, to ``result``."""
    offset = len(result_shape) - len(shape)
    return tuple(
        result[offset + dim] if size == result_shape[offset + dim] else ()
        for dim, size in enumerate(shape)
    )


def reshaped(shape: Sequence[int], result: Sequence[int]) -> tuple[Dims, Dims]:
    """Common factors of two shapes with the same number of elements, row-major.

    Dims that cross each other's boundaries get a blocked factor each: their parts do not match.
    """
    dims: tuple[list[Dim], list[Dim]] = ([], [])
    for (low, high), (first, last) in matching_spans(shape, result):
        sides = shape[low:high], result[first:last]
        common = common_factors(*sides)
        if common is None:
            spans = ("in", len(shape) - low, sides[0]), ("out", len(result) - first, sides[1])
            for side, (owner, end, sizes) in zip(dims, spans, strict=True):
                side += [
                    private((size,), f"{owner}{end - 1 - index}_")[0]
                    for index, size in enumerate(sizes)
                ]
            continue
        # Named by the number of elements after it, which makes the name unique in the rule.
        behind = math.prod(shape[high:])
        factors = [
            Factor(f"x{behind * math.prod(common.sizes[index + 1 :])}", size)
            for index, size in enumerate(common.sizes)
        ]
        for side, groups in zip(dims, (common.source, common.target), strict=True):
            side += [tuple(factors[index] for index in group) for group in groups]
    return tuple(dims[0]), tuple(dims[1])


def record_cuts(shape: Sequence[int], result: Sequence[int]) -> None:
    """Compare open sizes as :func:`reshaped` compares the example's, to record the comparisons."""
    cuts = sorted([*_cuts(shape), *_cuts(result)], key=example_number)
    for low, high in itertools.pairwise(cuts):
        if is_open(low) or is_open(high):
            # Evaluated for its side effect: an open size records every comparison.
            _ = low == high or high % low == 0 or low < high


def _cuts(shape: Sequence[int]) -> list[int]:
    """Number of elements to the right of each dim boundary, from the innermost outwards."""
    cuts, count = [1], 1
    for size in reversed(shape):
        count *= size
        cuts.append(count)
    return cuts
