"""Correspondence of dims before and after a reshape: the one matcher of two shapes.

Dims are matched in row-major order: they are cut where the numbers of elements of both shapes
agree. PyTorch's own matcher (``view_groups`` of DTensor) is private and returns groups only, while
rules and merged views need the factors inside of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sp_compiler.ir.symbolic import is_open

Span = tuple[int, int]
"""First dim, and one past the last."""


def matching_spans(source: Sequence[int], target: Sequence[int]) -> list[tuple[Span, Span]]:
    """Smallest runs of dims of both shapes with the same number of elements, in order.

    No size is 0: the sizes of an empty tensor do not tell which dims correspond.

    A size of 1 without a counterpart joins the following run: ``(2, 3) -> (2, 1, 3)`` gives ``(0,
    1), (0, 1)``, ``(1, 2), (1, 3)``. At the end it forms a run of its own.
    """
    # Both shapes have as many elements, so the loop ends at the end of both.
    spans = []
    low = first = 0
    while low < len(source) or first < len(target):
        high, last = low, first
        # Elements in the run so far, on either side; the smaller side takes its next dim.
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
    """Factors that two shapes are products of, in one order.

    Attributes:
        sizes: sizes of the factors, outermost first; none is 1.
        source: for each dim of the first shape its factors, as positions in ``sizes``.
        target: the same of the second shape.
    """

    sizes: list[int] = field(default_factory=list)
    source: list[list[int]] = field(default_factory=list)
    target: list[list[int]] = field(default_factory=list)


def common_factors(source: Sequence[int], target: Sequence[int]) -> CommonFactors | None:
    """Return the coarsest common factors of both shapes; ``None`` if a dim of one straddles dims of
    the other.

    ``(6, 4) -> (2, 12)`` has ``2, 3, 4``; ``(4, 6) -> (6, 4)`` has none. Sizes may be open; as few
    comparisons as possible are made, because each is recorded. No size is 0, as above.
    """
    factors = CommonFactors(source=[[] for _ in source], target=[[] for _ in target])
    # An open size is never compared with 1: a size that is 1 in the example is not left open.
    left = [(dim, size) for dim, size in enumerate(source) if is_open(size) or size != 1][::-1]
    for position, missing in enumerate(target):
        # ``missing``: what the target's dim still needs, ``size``: what the source's dim has left.
        while missing > 1:
            if not left:
                return None
            dim, size = left.pop()
            if missing % size:
                if size % missing:  # neither divides the other: the dims overlap in part only
                    return None
                left.append((dim, size // missing))  # goes on in the target's next dim
                size = missing
            missing //= size
            for where in (factors.source[dim], factors.target[position]):
                where.append(len(factors.sizes))
            factors.sizes.append(size)
    return None if left else factors
