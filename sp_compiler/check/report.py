"""Report of a check: nodes whose placements it derived, and nodes that it had to trust."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node


@dataclass
class CheckReport:
    """Result of a successful check.

    Attributes:
        checked: number of nodes whose placement was derived.
        trusted: nodes whose declared placement was accepted without derivation, each with the
            reason.
    """

    checked: int = 0
    trusted: list[tuple[Node, str]] = field(default_factory=list)
