"""Prices of the placement problem: us of one step, at the nominal number of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from sp_compiler.base.placement import I, Placement, R
from sp_compiler.cost.hardware import Hardware, conversion_us, operator_us
from sp_compiler.cost.node_cost import product_flops
from sp_compiler.ir.program import Program
from sp_compiler.passes.sharding.dim_roles import RegionValues, Value, value_bytes, value_shape
from sp_compiler.rules.strategies import Strategy

Key = tuple[int, Value]
"""A value of the problem: (index of the region, value)."""

# Longer than any step takes.
_LAST_RESORT_US = 1e6
# Prices that no step actually pays, in multiples of the time that the bytes take over the
# interconnect, so that their weight relative to communication is the same on every machine. First a
# byte of the largest matrix, if every rank holds it (of others in proportion to their size): large
# enough that a weight matrix is sharded whenever it can be, while a small adapter is not worth a
# collective.
_REPLICATED_CROSSINGS = 4500.0
# A byte saved for backward between two regions: large enough that rows are sharded if gathering
# them costs the same either way, while a value that several layers read in full (an encoder's
# states) is gathered once.
_KEPT_CROSSINGS = 4.5


class Prices:
    """Prices of running, converting, saving and storing values, over all calls of a region.

    Args:
        program: unsharded.
        facts: of each region.
        world_size: number of ranks.
        nominal_tokens: number of tokens per batch for prices: placements are decided once and must
            suit later batches, not a short example.
        fixed: storage placements decided by an earlier compilation.
        hardware: profile of the device and its links.

    Attributes:
        num_calls: number of calls of each region.
        params: parameters among the placeholders of each region, an ordered set.
    """

    def __init__(
        self,
        program: Program,
        facts: Sequence[RegionValues],
        world_size: int,
        nominal_tokens: int,
        fixed: dict[str, Placement],
        hardware: Hardware,
    ) -> None:
        self._program = program
        self._hardware = hardware
        self._regions = program.regions
        self._facts = facts
        self._world_size = world_size
        self._fixed = fixed
        self.num_calls = [len(program.paths(region)) for region in self._regions]
        rows = [
            math.prod(value_shape(value)[: each.num_rows(value)])
            for each in facts
            for value in each.active
            if each.num_rows(value)
        ]
        # Scaled up only: an example that is longer than nominal is used as it is.
        self._scale = max(1.0, nominal_tokens / max(1, max(rows, default=1)))
        self.params = [
            {
                node: None
                for node, kind in zip(region.placeholders, region.input_kinds, strict=True)
                if kind == "param"
            }
            for region in self._regions
        ]
        params = [node for each in self.params for node in each]
        # The reference size of stored_us(). Parameters with more than two dims are left out: they
        # are stacks of matrices (experts), compared with which every matrix would be small.
        matrices = [node for node in params if node.meta["val"].ndim == 2] or params
        self._largest_matrix_bytes = max((value_bytes((node, 0)) for node in matrices), default=0)

    def conversion_us(self, key: Key, source: Placement, target: Placement) -> float | None:
        """Return the price of a conversion; ``None`` if it is impossible.

        Parameters are only converted from I to R. One that an earlier compilation sharded is
        gathered if an operator of this program needs it unsharded.
        """
        i, value = key
        if value[0] in self.params[i]:
            if source.is_sharded and target.is_replicated and self._is_fixed(i, value[0]):
                return _LAST_RESORT_US * self.num_calls[i]
            # Its gradient shares one bucket with all others: no latency of its own. An all-reduce
            # crosses the link twice.
            wire_us = value_bytes(value) * 2 / self._hardware.link_bytes_per_us
            return wire_us * self.num_calls[i] if (source, target) == (I, R) else None
        needs_grad = bool(value[0].meta.get("requires_grad"))
        # Collectives send the padding too.
        shards = [p for p in (source, target) if p.is_sharded]
        parts = [self._share(value, placement) * self._world_size for placement in shards]
        num_bytes = self._nominal_bytes(i, value) * max(parts, default=1.0)
        on = self._world_size, self._hardware
        cost = conversion_us(num_bytes, source, target, *on, needs_grad=needs_grad)
        return None if cost is None else cost * self.num_calls[i]

    def operator_us(
        self, i: int, node: Node, operands: list[Value], results: list[Value], strategy: Strategy
    ) -> float:
        """Price of running ``node`` by ``strategy``."""
        placed = list(
            zip((*operands, *results), (*strategy.operands, *strategy.results), strict=True)
        )
        shares = [self._share(value, placement) for value, placement in placed]
        moved_bytes = sum(
            self._nominal_bytes(i, value) * share
            for (value, _), share in zip(placed, shares, strict=True)
        )
        # A matmul with any sharded operand is divided: by rows, columns or the summed dim. A rank
        # also computes the padding in its part.
        cut = [share for (_, p), share in zip(placed, shares, strict=True) if p.is_sharded]
        own_flops = product_flops(node) * self._scale_of(i, results[0]) * max(cut, default=1.0)
        cost = operator_us(own_flops, moved_bytes, self._hardware)
        return cost * self.num_calls[i]

    def stored_us(self, param: Value, placement: Placement) -> float:
        """Return the price of what a rank stores of a parameter beyond its even share of it.

        It grows with the square of the parameter's size.
        """
        # The square makes a norm's weight, small compared with a matrix, not worth a collective.
        num_bytes = value_bytes(param)
        share = num_bytes / self._largest_matrix_bytes
        redundant_bytes = num_bytes * (self._share(param, placement) - 1 / self._world_size)
        return redundant_bytes * share * _REPLICATED_CROSSINGS / self._hardware.link_bytes_per_us

    def saved_us(self, keys: Sequence[Key]) -> float:
        """Return the price of saving values on every rank instead of sharding them."""
        num_bytes = sum(self._nominal_bytes(i, value) * self.num_calls[i] for i, value in keys)
        redundant_bytes = num_bytes * (self._world_size - 1) / self._world_size
        return redundant_bytes * _KEPT_CROSSINGS / self._hardware.link_bytes_per_us

    def _share(self, value: Value, placement: Placement) -> float:
        """The part of a value that a rank has, padding included."""
        if not placement.is_sharded:
            return 1.0
        padding = placement.padding(self._world_size) if placement.kind == "S" else 0
        size = value_shape(value)[placement.dim] if padding else 1
        return (1 + padding / size) / self._world_size

    def _is_fixed(self, i: int, node: Node) -> bool:
        # The first call stands for all: parameters read at one position are placed the same.
        position = self._regions[i].placeholders.index(node)
        calls = (call for call in self._program.calls if call.region is self._regions[i])
        return next(calls).args[position].name in self._fixed

    def _nominal_bytes(self, i: int, value: Value) -> float:
        return value_bytes(value) * self._scale_of(i, value)

    def _scale_of(self, i: int, value: Value) -> float:
        # A square of tokens (scores) has two token dims but one batch: it grows with its sequence.
        count = self._facts[i].num_token_dims(value)
        return float(self._scale ** max(1, count - 1)) if count else 1.0
