"""Units (heads) of fused dims whose number is not divisible by the number of ranks, and the dims
that are cut by them.

A dim (heads width) that is padded is padded by heads, and so are the weights before and after
attention, whose own dims do not tell how many heads they have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sp_compiler.base.placement import Segmentation
from sp_compiler.passes.sharding.dim_roles import Value
from sp_compiler.rules.factors import Dim, Dims, Factor
from sp_compiler.rules.strategies import cut_inside, padded_cut

# The parts in which the dims of values are cut; dicts with None as values are ordered sets.
Segmentations = dict[tuple[Value, int], dict[Segmentation, None]]
Places = Sequence[tuple[Value, Dims]]
"""The operands of an operator and its results, each with the factors of its dims."""


def demand_units(
    places: Places,
    segmentations: Segmentations,
    features: Collection[str],
    tokens: Collection[str],
    world_size: int,
) -> None:
    """Carry units to every dim of one operator that contains them, in both directions.

    Args:
        segmentations: added to.
        features: factors that come from a parameter's dim.
        tokens: factors that run over tokens.
    """
    firsts: dict[str, Factor] = {}
    cuts: dict[str, dict[Segmentation, None]] = {}
    dims = [
        (segmentations.setdefault((value, d), {}), dim, position)
        for value, all_dims in places
        for d, dim in enumerate(all_dims)
        for position in _positions(dim, tokens, world_size)
    ]
    for known, dim, position in dims:
        factor = dim[position]
        first = firsts.setdefault(factor.name, factor)
        of_factor = [_cut_of_factor(cut, dim, position) for cut in known if cut.units]
        if len(dim) > 1 and factor.name in features:
            of_factor.append(Segmentation((factor.size,), factor.size))
        # As sizes of the first tensor: grouped heads are one factor of two sizes.
        scaled = [padded_cut(cut, first.size, 1, 1) for cut in of_factor if cut is not None]
        cuts.setdefault(factor.name, {}).update((cut, None) for cut in scaled if cut is not None)
    for known, dim, position in dims:
        inside = [cut_inside(cut, dim, position) for cut in cuts[dim[position].name]]
        known.update((cut, None) for cut in inside if cut is not None)


def _positions(dim: Dim, tokens: Collection[str], world_size: int) -> Iterator[int]:
    """Yield the positions of the factors of ``dim`` that may be units, or be made of them."""
    for position, factor in enumerate(dim):
        if factor.blocked or factor.name in tokens or factor.size == 1:
            continue
        outer = [other for other in dim[:position] if other.name not in tokens]
        # No padding if it or a factor before it is divisible, and none of the width of heads.
        divides = any(other.size % world_size == 0 for other in (*outer, factor))
        is_width = bool(outer) and position == len(dim) - 1
        if len(dim) == 1 or not (divides or is_width):
            yield position


def _cut_of_factor(cut: Segmentation, dim: Dim, position: int) -> Segmentation | None:
    """Return how ``cut``, of ``dim``, cuts one of its factors: the inverse of ``cut_inside``."""
    if len(dim) == 1:
        return cut
    of_factor = Segmentation((dim[position].size,), cut.units)
    return of_factor if cut_inside(of_factor, dim, position) == cut else None


def demand_split_units(
    places: Places,
    split: tuple[int, tuple[int, ...]],
    segmentations: Segmentations,
    world_size: int,
) -> None:
    """Carry units through a split, each part of which has the same number: groups of q, k and v.

    Args:
        split: dim and sizes of the parts.
        segmentations: added to.
    """
    dim, sizes = split
    of_source, *of_parts = (segmentations.setdefault((value, dim), {}) for value, _ in places)
    units = [cut.units for cut in of_source if cut.sizes == sizes]
    units += [cut.units for known in of_parts for cut in known if len(cut.sizes) == 1]
    for count in dict.fromkeys(units):
        if count and count % world_size and not any(size % count for size in sizes):
            of_source[Segmentation(sizes, count)] = None
            for known, size in zip(of_parts, sizes, strict=True):
                known[Segmentation((size,), count)] = None


def split_units(
    source: Value, split: tuple[int, tuple[int, ...]], segmentations: Segmentations
) -> list[int]:
    """Return the numbers of units, each not divisible by the number of ranks, that every part of a
    split may have."""
    dim, sizes = split
    known = segmentations.get((source, dim), {})
    return [cut.units for cut in known if cut.units and cut.sizes == sizes]
