"""How the two halves of a value relate to the value of the full batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from sp_compiler.base.placement import Placement, S
from sp_compiler.rules.strategies import Strategy


@dataclass(frozen=True)
class Rows:
    """Each half has its part of the rows.

    Attributes:
        placement: the dim of the batch, and its segments if other indices are outside of it, as
            if the halves were two ranks.
        order: the sort that gives the order of the rows, separately in each half; ``None``: the
            order of the batch, so that the joined halves are the value.
    """

    placement: Placement
    order: Node | None = None

    @property
    def can_be_joined(self) -> bool:
        return self.order is None and not self.placement.segments


@dataclass(frozen=True)
class Order:
    """For each row in the order of ``sort`` its index among the unsorted rows of its half, divided
    by ``repeats``: rows of one token are consecutive."""

    sort: Node
    repeats: int = 1


@dataclass(frozen=True)
class Places:
    """For each unsorted row its position in the order of ``sort``: inverse of :class:`Order`."""

    sort: Node


@dataclass(frozen=True)
class Counts:
    """Counts of the rows of each half separately."""


@dataclass(frozen=True)
class Unread:
    """No operator that reads it is known to be correct on halves."""


State = Rows | Order | Places | Counts | Unread
BATCH_FIRST = Rows(S(0))


@dataclass(frozen=True)
class Split:
    """How an operator runs once per half.

    Attributes:
        strategy: placements of operands and results, with the halves as two ranks.
        states: of the results.
        numbered: operands that number the rows: both halves count from 0.
    """

    strategy: Strategy
    states: tuple[State, ...]
    numbered: frozenset[Node] = frozenset()
