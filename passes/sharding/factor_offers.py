"""Factors of an operator that may be sharded at its position in the graph, and their parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sp_compiler.base.placement import Segmentation
from sp_compiler.passes.sharding.dim_roles import RegionValues, Value, is_elementwise
from sp_compiler.passes.sharding.labels import parts_at
from sp_compiler.rules.factors import Dim, Factor, OpRule
from sp_compiler.rules.strategies import cut_inside, padded_cut


class FactorOffers:
    """Offers for the factors of one operator with a rule, from the roles of its dims.

    Args:
        facts: facts about its region, with labelled dims.
        rule: rule of the operator.
        operands: its tensor operands, in order.
        results: its results.
        unsharded: values that elementwise operators keep unsharded.
        world_size: number of ranks.
    """

    def __init__(
        self,
        facts: RegionValues,
        rule: OpRule,
        operands: list[Value],
        results: list[Value],
        unsharded: Collection[Value],
        world_size: int,
    ) -> None:
        self._facts = facts
        self._world_size = world_size
        dims = (*rule.operands, *rule.results)
        self._dims = list(zip((*operands, *results), dims, strict=True))
        # Tokens are sharded as rows or not at all: a factor of them is never sharded by itself.
        self._of_tokens = {
            part.name
            for value, item in self._dims
            for d, dim in enumerate(item)
            if (value, d) in facts.tokens
            for part in dim
        }
        self._is_fixed = results[0] in unsharded and is_elementwise(results[0][0])

    def shardable(self, factor: Factor) -> bool:
        """Return whether ``factor`` may be sharded and comes from a parameter's dim somewhere."""
        features = self._facts.features
        return self._may_cut(factor) and any(
            (value, d) in features for value, d, _ in self._places(factor)
        )

    def segmentations(self, factor: Factor) -> list[Segmentation]:
        """Return the parts into which other operators split the dim, which must be a feature."""
        if self._is_fixed or factor.name in self._of_tokens:
            return []
        cuts: dict[Segmentation, None] = {}
        for value, d, dim in self._places(factor):
            if len(dim) == 1:
                known = self._facts.segmentations.get((value, d), {})
                # Units are those of the first tensor: grouped heads are one factor of two sizes.
                scaled = [padded_cut(c, factor.size, 1, 1) if c.units else c for c in known]
                cuts.update((cut, None) for cut in scaled if cut is not None)
            if factor.size % self._world_size and (value, d) in self._facts.features:
                cuts[Segmentation((factor.size,), factor.size)] = None
        may_cut = self._may_cut(factor)
        return [
            cut
            for cut in cuts
            if (self._may_pad(factor, cut) if cut.is_padded(self._world_size) else may_cut)
        ]

    def _may_pad(self, factor: Factor, cut: Segmentation) -> bool:
        """Return whether all fused dims that contain ``factor`` are to be cut this way."""
        fused = (place for place in self._places(factor) if len(place[2]) > 1)
        return all(
            cut_inside(cut, dim, [part.name for part in dim].index(factor.name))
            in self._facts.segmentations.get((value, d), {})
            for value, d, dim in fused
        )

    def _places(self, factor: Factor) -> Iterator[tuple[Value, int, Dim]]:
        for value, item in self._dims:
            for d, dim in enumerate(item):
                if any(part.name == factor.name for part in dim):
                    yield value, d, dim

    def _may_cut(self, factor: Factor) -> bool:
        if self._is_fixed or factor.name in self._of_tokens:
            return False
        demanded = self._facts.segmentations
        for value, d, dim in self._places(factor):
            # In a fused dim only the outermost divisible factor: sharding by another costs the
            # same, and an odd one might be picked. Unless a later operator cuts the dim there.
            dividing = [
                part.name
                for part in dim
                if part.size % self._world_size == 0 and part.name not in self._of_tokens
            ]
            outermost = len(dim) == 1 or dividing[:1] == [factor.name]
            parts = Segmentation(parts_at(dim, factor))
            if not outermost and parts not in demanded.get((value, d), {}):
                return False
        return True
