"""The names of the passes, and the record of what one of them did.

A pass takes what it rewrites and its options, and returns the result, or nothing where it works in
place. It reports by :func:`report_of`, so that its parts need not hand a report through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from sp_compiler.base.provenance import source_line

if TYPE_CHECKING:
    from torch.fx import Node


class Pass(StrEnum):
    """The passes in the order in which they run.

    The name of a pass is the same everywhere: in the stages of a compilation, its reports and
    times, :class:`~sp_compiler.PassError`, ``meta["origin"]`` of a node, and ``first_bad_pass`` of
    a verification. User passes have the names that the user gives them.
    """

    EXPORT = "export"
    NORMALIZE = "normalize"
    HALF_BATCHES = "half_batches"
    OUTLINE = "outline"
    SHARD = "shard"
    # Twice: the sharded forward before it is differentiated, and what runs in the end.
    CHECK = "check"
    JOINT = "joint"
    SIMPLIFY = "simplify"
    CHUNK = "chunk"
    TAG = "tag"
    PARTITION = "partition"
    SPLIT_BACKWARD = "split_backward"
    OVERLAP = "overlap"
    CODEGEN = "codegen"

    def __repr__(self) -> str:
        return repr(self.value)  # as the names of the user's own passes, beside which it is shown


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
        kinds: the same by kind of rewrite, where the pass has several.
        declined: candidates that it left as they are, with the reason.
        node_delta: how many more nodes the graphs have than before, counted by the compiler.
        seconds: wall-clock time that it took, measured by the compiler.
    """

    name: str
    rewrites: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    declined: list[Declined] = field(default_factory=list)
    node_delta: int = 0
    # Not compared: no two runs of one pass take the same time.
    seconds: float = field(default=0.0, compare=False)

    def rewrote(self, count: int = 1, kind: str = "") -> None:
        """Record ``count`` more rewrites."""
        self.rewrites += count
        if kind and count:
            self.kinds[kind] = self.kinds.get(kind, 0) + count

    def decline(self, node: Node, reason: str) -> None:
        """Record that ``node`` was a candidate and was left as it is."""
        self.declined.append(Declined(node.name, reason, source_line(node)))

    def add(self, other: PassReport) -> None:
        """Add what another run of the pass did."""
        self.rewrites += other.rewrites
        for kind, count in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count
        self.declined += other.declined
        self.node_delta += other.node_delta
        self.seconds += other.seconds


def report_lines(reports: Sequence[PassReport]) -> Iterator[str]:
    """Yield a line per pass, and below it one per reason for which it declined a candidate."""
    width = max((len(report.name) for report in reports), default=0)
    for report in reports:
        yield (
            f"{report.name:<{width}}  {report.seconds:7.3f} s  {report.rewrites:5} rewrites  "
            f"{report.node_delta:+5} nodes"
        )
        # A layer's candidates are declined in every layer: one line, with the first of them.
        reasons = dict.fromkeys(item.reason for item in report.declined)
        for reason in reasons:
            items = [item for item in report.declined if item.reason == reason]
            first = f"{items[0].node}, {items[0].line}".removesuffix(", ")
            yield f"{'':{width}}  declined {len(items)} x: {reason} ({first})"


# A context variable and no global: several threads may compile at the same time.
_RUNNING: ContextVar[PassReport | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def reporting(report: PassReport) -> Iterator[PassReport]:
    """Let the pass of this name, run inside, report to ``report``."""
    token = _RUNNING.set(report)
    try:
        yield report
    finally:
        _RUNNING.reset(token)


def report_of(name: str) -> PassReport:
    """Return the report of the pass ``name`` if the compiler runs it, else one that nobody reads.

    This lets a pass try out others: what those rewrite while they are measured is not reported.
    """
    running = _RUNNING.get()
    return running if running is not None and running.name == name else PassReport(name)
