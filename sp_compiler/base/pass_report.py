"""The names of the passes, and the record of what one of them did."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sp_compiler.base.provenance import source_line

if TYPE_CHECKING:
    from torch.fx import Node


class Pass(StrEnum):
    """The passes in the order in which they run.

    Everything that says which pass is meant uses these names: the stages of a compilation, its
    reports and times, :class:`~sp_compiler.PassError`, ``meta["origin"]`` of a node, and
    ``first_bad_pass`` of a verification. The user's own passes are called as they call them.
    """

    EXPORT = "export"
    NORMALIZE = "normalize"
    OUTLINE = "outline"
    SHARD = "shard"
    # Twice: the sharded forward before it is differentiated, and what runs in the end.
    CHECK = "check"
    JOINT = "joint"
    SIMPLIFY = "simplify"
    TAG = "tag"
    PARTITION = "partition"
    OVERLAP = "overlap"
    CODEGEN = "codegen"


@dataclass(frozen=True)
class Declined:
    """A candidate that a pass left as it is.

    Attributes:
        node: its name in the graph.
        reason: why, in a few words.
        line: of the user's model, as "file.py:12 code", "" where unknown.
    """

    node: str
    reason: str
    line: str = ""


@dataclass
class PassReport:
    """Effect of a pass on a model: the sum over all graphs that it was given.

    Attributes:
        name: of the pass.
        rewrites: how often it changed something; what counts as once is for the pass to say.
        declined: what it might have changed, with the reason why it did not.
        node_delta: how many more nodes the graphs have than before, counted by the compiler.
        seconds: wall-clock time that it took, measured by the compiler.
    """

    name: str
    rewrites: int = 0
    declined: list[Declined] = field(default_factory=list)
    node_delta: int = 0
    seconds: float = 0.0

    def decline(self, node: Node, reason: str) -> None:
        """Record that ``node`` was a candidate and was left as it is."""
        self.declined.append(Declined(node.name, reason, source_line(node)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "declined": [vars(item) for item in self.declined]}
