"""All ways to run an operator on several ranks, derived from its factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sp_compiler.base.placement import I, P, Placement, R, S, T
from sp_compiler.rules.factors import Dims, Factor, OpRule, Rows


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator: placements of its tensor operands and of its results.

    ``lowering``: the operators that replace it if one rank does not run the operator itself: a
    lookup or a loss over a sharded vocabulary, or a divided sum instead of a mean.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    lowering: Literal["itself", "vocabulary", "sum"] = "itself"

    @property
    def is_replicated(self) -> bool:
        return all(p.is_replicated for p in (*self.operands, *self.results))


@dataclass(frozen=True)
class Offers:
    """Restrictions of a rule's strategies by the surrounding graph.

    Attributes:
        world_size: number of ranks.
        shardable: whether a factor may be sharded as a feature (heads, width, vocabulary).
        segmentations: the part sizes, if any, into which a later operator splits a factor's dim.
        may_pad: whether a factor that is not divisible may be sharded with padding.
        num_rows: number of leading token dims of operand / result ``i``; 0 if it has no rows form.
        sequence_parallel: whether values may be sharded by rows at all.
    """

    world_size: int
    shardable: Callable[[Factor], bool]
    segmentations: Callable[[Factor], Sequence[tuple[int, ...]]]
    operand_rows: Sequence[int]
    result_rows: Sequence[int]
    sequence_parallel: bool = True
    may_pad: Callable[[Factor], bool] = lambda factor: False


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
        # An operator that counts its place in the global tensor would count wrong in segments.
        parts = () if rule.placed else tuple(offers.segmentations(factor))
        odd = factor.size > 1 and factor.size % offers.world_size
        if odd and not rule.placed and offers.may_pad(factor):
            parts = (*parts, (factor.size,))  # one segment that does not divide: a padded shard
        for segments in (*([()] if offers.shardable(factor) else []), *parts):
            candidate = shard_factor(rule, factor, segments, offers.world_size)
            offered += [candidate] if candidate else []
    if rule.split is not None:
        dim, sizes = rule.split
        if all(size % offers.world_size == 0 for size in sizes):
            offered.append(Strategy((S(dim, sizes),), (S(dim),) * num_results))
    if offers.sequence_parallel:
        candidate = _shard_rows(rule, offers)
        offered += [candidate] if candidate else []
    # Without repeats, and in one order on every rank, in contrast to a set.
    return list(dict.fromkeys(offered))


def _factors(rule: OpRule) -> list[Factor]:
    """Each shardable factor once; if sizes differ (grouped heads), the first represents all."""
    names: dict[str, Factor] = {}
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            for factor in dim:
                names.setdefault(factor.name, factor)
    return [factor for factor in names.values() if not factor.blocked]


def shard_factor(
    rule: OpRule, factor: Factor, segments: tuple[int, ...], world_size: int
) -> Strategy | None:
    """Return the strategy with ``factor`` sharded over ``world_size`` ranks, or ``None``.

    Args:
        segments: sizes of the segments, each of which is sharded; () if the dim is one part.
    """
    operands = [_placement_of(dims, factor, segments, world_size) for dims in rule.operands]
    results = [_placement_of(dims, factor, segments, world_size) for dims in rule.results]
    if None in operands or None in results:
        return None
    # A result without the factor holds one rank's share of a sum, or, for any other operator, is
    # not what all ranks have: there is no such placement.
    averaged = factor in rule.averaged
    if averaged or any(factor.name == contracted.name for contracted in rule.contracted):
        results = [P if placement == R else placement for placement in results]
    elif R in results:
        return None
    # One cut serves all: S(0) of one tensor is not the rows of S(0|4,4) of another.
    cuts = {p.segments for p in (*operands, *results) if p is not None and p.kind == "S"}
    if segments and len(cuts) != 1:
        return None
    if factor.size == world_size and all(placement == R for placement in operands):
        # A dim that only the result has, cut to size 1: nothing in the traced graph would show the
        # sum over it that its gradient needs.
        return None
    lowering: Literal["itself", "sum"] = "sum" if averaged else "itself"
    return Strategy(tuple(operands), tuple(results), lowering)  # type: ignore[arg-type]


def _placement_of(
    dims: Dims, factor: Factor, segments: tuple[int, ...], world_size: int
) -> Placement | None:
    """Placement of a tensor when ``factor`` is sharded; R without it, ``None`` if impossible."""
    for position, dim in enumerate(dims):
        names = [item.name for item in dim]
        if factor.name not in names:
            continue
        index = names.index(factor.name)
        outer, size = 1, 1
        for item in dim[:index]:
            outer *= item.size
        for item in dim:
            size *= item.size
        if segments:
            # A single segment that does not divide is padded; of several none can be.
            divides = len(segments) == 1 or not any(s % world_size for s in segments)
            fits = len(dim) == 1 and sum(segments) == size and divides
            return S(position, segments) if fits else None
        if dim[index].size % world_size:
            return None
        # Behind an outer factor each of its rows is cut: as many segments, all of one size.
        return S(position, (size // outer,) * outer if outer > 1 else ())
    return R


def _shard_rows(rule: OpRule, offers: Offers) -> Strategy | None:
    """Every value flattened to rows of tokens, which are sharded: ``T`` of the same factors."""
    leading = {
        _leading(dims, rows) for dims, rows in zip(rule.results, offers.result_rows, strict=True)
    }
    if len(leading) != 1 or not (rows := leading.pop()):
        return None
    result = (len(rule.results[0]), offers.result_rows[0])
    # Flattened to the last dim, rows would not tell the operator where its part begins.
    if rule.placed and result[0] == result[1] > 1:
        return None
    operands: list[Placement] = []
    for dims, count in zip(rule.operands, offers.operand_rows, strict=True):
        if count and _leading(dims, count) == rows:
            if not _flatten_alike(rule.rows, (len(dims), count), result):
                return None
            operands.append(T(count))
        # Some of the token dims, or all in another order: its rows are not those of the result.
        elif any(factor in rows for dim in dims for factor in dim):
            return None
        else:
            operands.append(R)
    # What is placed may make its rows of nothing but their place.
    if not any(p.kind == "T" for p in operands) and not rule.placed:
        return None
    return Strategy(tuple(operands), tuple(T(count) for count in offers.result_rows))


def _flatten_alike(rows: Rows, operand: tuple[int, int], result: tuple[int, int]) -> bool:
    """Return whether the operator maps flattened rows to flattened rows; both are (number of dims,
    row dims)."""
    (rank, count), (result_rank, result_count) = operand, result
    if rows == "fixed":
        return count == result_count == 1
    # Aligned from the right: as many dims must stand behind the rows.
    if rows == "broadcast":
        return rank - count == result_rank - result_count
    return rows == "relabel" or count == result_count


def _leading(dims: Dims, count: int) -> tuple[Factor, ...]:
    """Factors of the first ``count`` dims; () where one of them cannot be sharded."""
    factors = tuple(factor for dim in dims[:count] for factor in dim)
    return () if any(factor.blocked for factor in factors) else factors
