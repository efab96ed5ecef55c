"""Correspondence of dims before and after a reshape: the only matcher of two shapes.

Dims are matched in row-major order: they are cut where the numbers of elements of both shapes
agree. PyTorch's own matcher (``view_groups`` of DTensor) is private and returns only groups, while
rules and merged views need the factors inside of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sp_compiler.ir.symbolic import is_open

Span = tuple[int, int]
"""First dim, and one after the last."""


def matching_spans(source: Sequence[int], target: Sequence[int]) -> list[tuple[Span, Span]]:
    """Return the smallest runs of dims of both shapes with equal numbers of elements, in order.

    No size may be 0: the sizes of an empty tensor do not show which dims correspond.

    A size of 1 without a counterpart joins the following run: ``(2, 3) -> (2, 1, 3)`` gives ``(0,
    1), (0, 1)``, ``(1, 2), (1, 3)``. At the end it is a separate run.
    """
    # Both shapes have the same number of elements, so the loop ends at the end of both.
    spans = []
    low = first = 0
    while low < len(source) or first < len(target):
        high, last = low, first
        # Elements in the run so far on either side; the smaller side takes its next dim.
        left = right = 1
        if high < len(source):
            left, high = source[high], high + 1
        if last < len(target):
            right, last = target[last], last + 1
        while left != right:
            if left < right:
                left, high = left * source[high], high + 1
            else:
                right, last = right * target[last], last + 1
        spans.append(((low, high), (first, last)))
        low, first = high, last
    return spans


@dataclass
class CommonFactors:
    """Common factors of the dims of two shapes, in row-major order.

    Attributes:
        sizes: sizes of the factors, outermost first; none is 1.
        source: factors of each dim of the first shape, as positions in ``sizes``.
        target: the same for the second shape.
    """

    sizes: list[int] = field(default_factory=list)
    source: list[list[int]] = field(default_factory=list)
    target: list[list[int]] = field(default_factory=list)


def common_factors(source: Sequence[int], target: Sequence[int]) -> CommonFactors | None:
    """Return the coarsest common factors of both shapes; ``None`` if a dim of one straddles dims of
    the other.

    ``(6, 4) -> (2, 12)`` has ``2, 3, 4``; ``(4, 6) -> (6, 4)`` has none. Sizes may be open; few
    comparisons are made, because each adds a guard. No size may be 0, as above.
    """
    factors = CommonFactors(source=[[] for _ in source], target=[[] for _ in target])
    # An open size is never compared with 1: a size that is 1 in the example is not left open.
    left = [(dim, size) for dim, size in enumerate(source) if is_open(size) or size != 1][::-1]
    for position, missing in enumerate(target):
        # ``missing``: remainder of the target's dim; ``size``: remainder of the source's dim.
        while missing > 1:
            if not left:
                return None
            dim, size = left.pop()
            if missing % size:
                if size % missing:  # neither is divisible by the other: the dims overlap in part
                    return None
                left.append((dim, size // missing))  # continues in the target's next dim
                size = missing
            missing //= size
            for where in (factors.source[dim], factors.target[position]):
                where.append(len(factors.sizes))
            factors.sizes.append(size)
    return None if left else factors
