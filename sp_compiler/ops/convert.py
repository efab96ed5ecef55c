"""Conversions between placements: the one table of what each does, costs and is called."""

from __future__ import annotations

from dataclasses import dataclass

from sp_compiler.base.placement import Placement

LINK_CROSSINGS = {
    # A ring moves (t-1)/t of the global value's bytes a number of times over the link; an
    # all-reduce is a reduce-scatter and an all-gather.
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
}
"""Collective, named as the method of the communicator, to how often its bytes cross the link."""


@dataclass(frozen=True)
class Conversion:
    """How a value placed one way becomes the same value placed another way.

    Attributes:
        method: of the communicator; "" where every rank's tensor stays as it is.
        text: the communication of forward, or of backward where only that has one, for people.
        offered: whether sharding may choose it. The others are gradients of those that it may, or
            convert values without gradient, to which the difference of R and I means nothing.
    """

    method: str
    text: str
    offered: bool = True

    @property
    def link_crossings(self) -> int:
        """How often the global value's bytes cross the link; 0: no communication."""
        return LINK_CROSSINGS.get(self.method, 0)


CONVERSIONS = {
    # (source kind, destination kind) -> what to do. The gradient is converted from the dual of the
    # destination to the dual of the source, so a row's backward is another row.
    ("S", "R"): Conversion("all_gather", "all-gather"),
    ("S", "I"): Conversion("all_gather", "all-gather"),
    ("P", "S"): Conversion("reduce_scatter", "reduce-scatter"),
    ("P", "I"): Conversion("all_reduce", "all-reduce"),
    ("P", "R"): Conversion("all_reduce", "all-reduce", offered=False),
    ("R", "S"): Conversion("shard", "slice"),
    ("I", "S"): Conversion("shard", "slice, and all-gather of the gradient"),
    ("S", "P"): Conversion("zero_pad_to_partial", "padding with zeros", offered=False),
    ("I", "R"): Conversion("", "all-reduce of the gradient"),
    ("R", "I"): Conversion("", "nothing", offered=False),
}


def conversion_between(source: Placement, target: Placement) -> Conversion | None:
    """The row of :data:`CONVERSIONS`, rows of tokens ("T") being shards; ``None``: there is none.

    Two different shards have no row: the way from one to the other is through the global value.
    """
    kinds = ["S" if placement.is_sharded else placement.kind for placement in (source, target)]
    return CONVERSIONS.get((kinds[0], kinds[1]))
