"""All ways to run an operator on several ranks, derived from its factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sp_compiler.base.placement import I, P, Placement, R, S, Segmentation, T
from sp_compiler.rules.factors import Dim, Dims, Factor, OpRule, Rows


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator: placements of its tensor operands and of its results.

    ``lowering``: the operators that replace it if one rank does not run the operator itself: a
    lookup or a loss over a sharded vocabulary, or a divided sum instead of a mean. ``whole``:
    positions of results that are the same whatever is sharded.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    lowering: Literal["itself", "vocabulary", "sum"] = "itself"
    whole: tuple[int, ...] = ()

    @property
    def is_replicated(self) -> bool:
        return all(p.is_replicated for p in (*self.operands, *self.results))

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank runs a part of the operator."""
        return any(p.is_sharded for p in (*self.operands, *self.results))


@dataclass(frozen=True)
class Offers:
    """Restrictions of a rule's strategies by the surrounding graph.

    Attributes:
        world_size: number of ranks.
        shardable: whether a factor may be sharded as a feature (heads, width, vocabulary).
        segmentations: the segments, if any, into which a later operator splits a factor's dim.
        operand_rows: number of leading token dims of each operand; 0 if it has no rows form.
        result_rows: the same of each result.
        sequence_parallel: whether values may be sharded by rows at all.
        may_pad: whether a factor that is not divisible may be sharded with padding.
        split_units: numbers of units, not divisible, in each part of a split.
    """

    world_size: int
    shardable: Callable[[Factor], bool]
    segmentations: Callable[[Factor], Sequence[Segmentation]]
    operand_rows: Sequence[int]
    result_rows: Sequence[int]
    sequence_parallel: bool = True
    may_pad: Callable[[Factor], bool] = lambda factor: False
    split_units: Sequence[int] = ()


def strategies(
    rule: OpRule | None, num_operands: int, num_results: int, offers: Offers
) -> list[Strategy]:
    """Return all strategies of ``rule``.

    Without a rule this is only the invariant one: with replicated operands the gradients would be
    partial sums, which are allowed only for an operator that is known to be linear in its gradient.
    """
    invariant = Strategy((I,) * num_operands, (I,) * num_results)
    if rule is None:
        return [invariant]
    offered = [Strategy((R,) * num_operands, (R,) * num_results), invariant]
    offered += [
        Strategy(
            tuple(P if position in chosen else R for position in range(len(rule.operands))),
            (P,) * len(rule.results),
        )
        for chosen in rule.linear
    ]
    for factor in _factors(rule):
        for cut in _cuts(rule, factor, offers):
            candidate = shard_factor(rule, factor, cut, offers.world_size)
            offered += [candidate] if candidate else []
    if rule.split is not None:
        dim, sizes = rule.split
        if all(size % offers.world_size == 0 for size in sizes):
            offered.append(Strategy((S(dim, sizes),), (S(dim),) * num_results))
        for units in offers.split_units:
            parts = tuple(S(dim, (size,), units) for size in sizes)
            offered.append(Strategy((S(dim, sizes, units),), parts))
    if offers.sequence_parallel:
        candidate = _shard_rows(rule, offers)
        offered += [candidate] if candidate else []
    # Without repeats, and in the same order on every rank, unlike a set.
    return [replace(each, whole=rule.whole) for each in dict.fromkeys(offered)]


def _cuts(rule: OpRule, factor: Factor, offers: Offers) -> list[Segmentation]:
    """Return the ways to cut ``factor`` over the ranks; a cut without sizes: as one part."""
    cuts = [Segmentation(())] if offers.shardable(factor) else []
    if not rule.segmented:
        return cuts
    # An operator that computes its position in the global tensor would be wrong in segments; with a
    # single one there is only padding, which it is told of.
    cuts += [cut for cut in offers.segmentations(factor) if not rule.placed or len(cut.sizes) == 1]
    may_pad = factor.size > 1 and offers.may_pad(factor)
    return [cut for cut in cuts if may_pad or not cut.is_padded(offers.world_size)]


def _factors(rule: OpRule) -> list[Factor]:
    """Each shardable factor once; if sizes differ (grouped heads), the first represents all."""
    names: dict[str, Factor] = {}
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            for factor in dim:
                names.setdefault(factor.name, factor)
    return [factor for factor in names.values() if not factor.blocked]


def shard_factor(
    rule: OpRule, factor: Factor, cut: Segmentation, world_size: int
) -> Strategy | None:
    """Return the strategy with ``factor`` sharded over ``world_size`` ranks, or ``None``.

    Args:
        cut: segments of the factor, each sharded; no sizes if it is one part.
    """
    operands = [_placement_of(dims, factor, cut, world_size) for dims in rule.operands]
    results = [_placement_of(dims, factor, cut, world_size) for dims in rule.results]
    if None in operands or None in results:
        return None
    # A result without the factor holds one rank's share of a sum. For any other operator it differs
    # between ranks without being a summand: there is no such placement.
    averaged = factor in rule.averaged
    for index in rule.whole:
        # With no operand placed R or I, the check takes it for I.
        results[index] = R if R in operands else I
    lacking = [i for i, placement in enumerate(results) if placement == R and i not in rule.whole]
    if averaged or any(factor.name == contracted.name for contracted in rule.contracted):
        results = [P if i in lacking else placement for i, placement in enumerate(results)]
    elif lacking:
        return None
    # One cut serves all: S(0) of one tensor has other rows than S(0|4,4) of another. Units are
    # scaled with the dim that they are in.
    cuts = {p.segments for p in (*operands, *results) if p is not None and p.kind == "S"}
    if cut.sizes and not cut.is_padded(world_size) and len(cuts) != 1:
        return None
    if -(-factor.size // world_size) == 1 and all(placement == R for placement in operands):
        # A dim that only the result has, cut to size 1: its gradient needs a sum over that dim, of
        # which the traced graph would show nothing.
        return None
    lowering: Literal["itself", "sum"] = "sum" if averaged else "itself"
    return Strategy(tuple(operands), tuple(results), lowering)  # type: ignore[arg-type]


def _placement_of(
    dims: Dims, factor: Factor, cut: Segmentation, world_size: int
) -> Placement | None:
    """Placement of a tensor when ``factor`` is sharded; R without it, ``None`` if impossible."""
    for position, dim in enumerate(dims):
        names = [item.name for item in dim]
        if factor.name not in names:
            continue
        index = names.index(factor.name)
        if cut.is_padded(world_size):
            of_dim = cut_inside(cut, dim, index)
            return None if of_dim is None else S(position, *of_dim)
        if cut.sizes:
            divides = not any(size % world_size for size in cut.sizes)
            fits = len(dim) == 1 and sum(cut.sizes) == dim[0].size and divides
            return S(position, cut.sizes) if fits else None
        if dim[index].size % world_size:
            return None
        # After an outer factor each of its rows is cut: that many segments, all of one size.
        outer, size = (math.prod(item.size for item in part) for part in (dim[:index], dim[index:]))
        return S(position, (size,) * outer if outer > 1 else ())
    return R


def cut_inside(cut: Segmentation, dim: Dim, position: int) -> Segmentation | None:
    """Return how a padded ``cut`` of the factor at ``position`` cuts its ``dim``."""
    outer, inner = (
        math.prod(item.size for item in items) for items in (dim[:position], dim[position + 1 :])
    )
    return padded_cut(cut, dim[position].size, outer, inner)


def padded_cut(cut: Segmentation, size: int, outer: int, inner: int) -> Segmentation | None:
    """Return how a padded ``cut`` of a factor cuts a dim (outer factor inner), or ``None``.

    Args:
        size: of the factor in this dim. Heads of queries and of grouped keys are one factor of two
            sizes: the units, groups of heads, are the same.
    """
    total, units = sum(cut.sizes), cut.units or cut.sizes[0]
    # A factor before several segments would repeat them in turn: no operator asks for that.
    if (len(cut.sizes) > 1 and outer > 1) or any(s * size % (total * units) for s in cut.sizes):
        return None
    return Segmentation(tuple(s * size // total * inner for s in cut.sizes) * outer, units)


def _shard_rows(rule: OpRule, offers: Offers) -> Strategy | None:
    """Every value flattened to rows of tokens, which are sharded: ``T`` of the same factors."""
    leading = {
        _leading(dims, rows) for dims, rows in zip(rule.results, offers.result_rows, strict=True)
    }
    if len(leading) != 1 or not (rows := leading.pop()):
        return None
    result = (len(rule.results[0]), offers.result_rows[0])
    # With all dims flattened to rows the operator could not know where its part begins.
    if rule.placed and result[0] == result[1] > 1:
        return None
    operands: list[Placement] = []
    for dims, count in zip(rule.operands, offers.operand_rows, strict=True):
        if count and _leading(dims, count) == rows:
            if not _flatten_alike(rule.rows, (len(dims), count), result):
                return None
            operands.append(T(count))
        # Only some of the token dims, or another order: its rows are not those of the result.
        elif any(factor in rows for dim in dims for factor in dim):
            return None
        else:
            operands.append(R)
    # A placed operator may make its rows from nothing but their position.
    if not any(p.kind == "T" for p in operands) and not rule.placed:
        return None
    return Strategy(tuple(operands), tuple(T(count) for count in offers.result_rows))


def _flatten_alike(rows: Rows, operand: tuple[int, int], result: tuple[int, int]) -> bool:
    """Return whether the operator maps flattened rows to flattened rows; both are (number of dims,
    row dims)."""
    (rank, count), (result_rank, result_count) = operand, result
    if rows == "fixed":
        return count == result_count == 1
    # Aligned from the right: the same number of dims must follow the rows.
    if rows == "broadcast":
        return rank - count == result_rank - result_count
    return rows == "relabel" or count == result_count


def _leading(dims: Dims, count: int) -> tuple[Factor, ...]:
    """Factors of the first ``count`` dims; () if one of them cannot be sharded."""
    factors = tuple(factor for dim in dims[:count] for factor in dim)
    return () if any(factor.blocked for factor in factors) else factors
