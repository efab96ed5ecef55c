"""Dims of a view, from the factors of its source.

Sizes are symbolic products here, in contrast to :mod:`sp_compiler.ir.reshapes`, which matches two
shapes of plain integers: its factors are never 1, but here a batch of one, or the one head that a
rank has, must be a factor. And if a size cannot be split, the dims to its left still can.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sp_compiler.planning.formula.sizes import (
    Atom,
    Dim,
    Share,
    cut_inner,
    resolved,
    size_of,
    split_inner,
    unknown,
)


def reshaped(
    dims: Sequence[Dim],
    shape: Sequence[int],
    *,
    sharded: int | None = None,
    to_right: bool = True,
) -> list[Dim]:
    """Return the dims of a view; a dim without separate factors in the source is unknown.

    Sizes alone do not determine where a factor of 1 goes. A factor that each rank has once goes
    into the dim ``sharded``, if that is known. Each new dim of size 1 takes one of the others. The
    remaining ones go outermost into the dim on their right, or innermost into that on their left.
    """
    source = tuple(itertools.chain.from_iterable(dims))
    # Before any cut, because the first one decides which factor ranks divide.
    for atom in resolved(source):
        _cut_segments(atom, shape)
    rest: Dim | None = source
    result: list[Dim] = []
    # From the innermost dim: if a size cannot be cut, leading dims remain, which views usually do
    # not change.
    for position in reversed(range(len(shape))):
        # Factors of 1 are not part of a size above 1; they are distributed below.
        size = shape[position]
        cut = None if rest is None else (rest, ()) if size == 1 else cut_inner(rest, size)
        if cut is None:  # the leading dims may still be those of the source
            same = position < len(dims) and [*map(size_of, dims)][: position + 1] == [
                *shape[: position + 1]
            ]
            result.append(dims[position] if same else unknown(size))
            rest = None
        else:
            rest, inner = cut
            rest = resolved(rest)
            count = _ones_taken(rest, shape, position, sharded, to_right)
            rest, inner = rest[: len(rest) - count], (*rest[len(rest) - count :], *inner)
            new = shape.count(1) > [*map(size_of, dims)].count(1)
            if not inner and result and new and sharded in (None, position):
                inner, result[-1] = _outer_share(result[-1])
            result.append(inner)
    return result[::-1]


def _ones_taken(
    rest: Dim, shape: Sequence[int], position: int, sharded: int | None, to_right: bool
) -> int:
    """Return how many of the innermost factors of 1 in ``rest`` belong to a dim of a view."""
    ones = [*itertools.takewhile(lambda atom: atom.value == 1, reversed(rest))]
    shares = [number for number, atom in enumerate(ones) if isinstance(atom.meaning, Share)]
    left = [*itertools.takewhile(lambda size: size == 1, reversed(shape[:position]))]
    # Dims of size 1 further left take one each; there is nothing further left of the first dim.
    spare = len(ones) - len(left) if to_right or position == 0 else 0
    count = max(spare, min(1, len(ones)) if shape[position] == 1 else 0)
    if shares and sharded == position:
        # Factors keep their order, so the factors inside of it belong to the dim too.
        return max(count, shares[-1] + 1)
    if shares and sharded is not None and position - len(left) - 1 <= sharded < position:
        return min(count, shares[0])
    return count


def _cut_segments(atom: Atom, shape: Sequence[int]) -> None:
    """Divide the inner factor among ranks if a view separates a sharded dim's segments."""
    if isinstance(atom.meaning, Share) and atom.meaning.segments > 1:
        count = atom.meaning.segments
        if (count, atom.value // count) in itertools.pairwise(shape):
            cut_inner(atom.meaning.full, size_of(atom.meaning.full) // count)


def _outer_share(dim: Dim) -> tuple[Dim, Dim]:
    """A sharded dim as the factor that ranks divide, one element per rank, and the rest."""
    first, *rest = resolved(dim) or (None,)
    if first is None or not isinstance(first.meaning, Share):
        return (), dim
    outer, *inner = split_inner(first, first.value) or (first,)
    return ((outer,), (*inner, *rest)) if outer.value == 1 else ((), dim)
