"""Report of a check: nodes whose placement it derived, and those that it had to trust."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node


@dataclass
class CheckReport:
    """Outcome of a check that refused nothing.

    Attributes:
        checked: number of nodes whose placement was derived.
        trusted: nodes whose declared placement was accepted without proof, each with the reason.
    """

    checked: int = 0
    trusted: list[tuple[Node, str]] = field(default_factory=list)
