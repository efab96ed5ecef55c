"""The names of the passes, and the record of what a pass did.

A pass takes the graphs that it rewrites and its options, and returns the result, or nothing if it
works in place. It gets its report from :func:`report_of`, so that reports need not be passed down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.provenance import source_line

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

UserPass = Callable[["GraphModule"], "PassReport | int | None"]
"""A pass of the user; see ``passes`` of :class:`sp_compiler.options.Options`."""


class Pass(StrEnum):
    """The passes in the order in which they run.

    The name of a pass is the same everywhere: in the stages of a compilation, its reports and
    times, :class:`~sp_compiler.PassError`, ``meta["origin"]`` of a node, and ``first_bad_pass`` of
    a verification. User passes have the names of their functions.
    """

    EXPORT = "export"
    NORMALIZE = "normalize"
    LOSS_ONLY = "loss_only"
    EXPERT_PARALLEL = "expert_parallel"
    HALF_BATCHES = "half_batches"
    OUTLINE = "outline"
    SHARD = "shard"
    # Runs twice: on the sharded forward before it is differentiated, and on the final graphs.
    CHECK = "check"
    FUSE_ATTENTION = "fuse_attention"
    JOINT = "joint"
    SIMPLIFY = "simplify"
    CHUNK = "chunk"
    SCALE_PRODUCTS = "scale_products"
    TAG = "tag"
    PARTITION = "partition"
    SPLIT_BACKWARD = "split_backward"
    OVERLAP = "overlap"
    ASYNC_TP = "async_tp"
    CODEGEN = "codegen"

    def __repr__(self) -> str:
        return repr(self.value)  # like the names of the user's passes, next to which it is shown


@dataclass(frozen=True)
class Declined:
    """A candidate that a pass did not rewrite.

    Attributes:
        node: name of the node in the graph.
        reason: the reason, in a few words.
        line: source line in the user's model, as "file.py:12 code"; "" if unknown.
    """

    node: str
    reason: str
    line: str = ""


class DeclinedError(Exception):
    """Raised and caught inside a pass: the reason why it does not rewrite a candidate."""


@dataclass
class PassReport:
    """Effect of a pass on a model, summed over all its graphs.

    Attributes:
        name: name of the pass.
        rewrites: number of rewrites; each pass defines what counts as one.
        kinds: number of rewrites by kind, if the pass has several kinds.
        declined: candidates that it did not rewrite, with the reason.
        node_delta: change in the number of nodes, counted by the compiler.
        seconds: wall-clock time of the pass, measured by the compiler.
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
        """Record that ``node`` was a candidate but was not rewritten, with the reason."""
        self.declined.append(Declined(node.name, reason, source_line(node)))

    def add(self, other: PassReport) -> None:
        """Add the report of another run of the pass."""
        self.rewrites += other.rewrites
        for kind, count in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count
        self.declined += other.declined
        self.node_delta += other.node_delta
        self.seconds += other.seconds


def report_lines(reports: Sequence[PassReport]) -> Iterator[str]:
    """Yield one line per pass, followed by one line per reason for declined candidates."""
    width = max((len(report.name) for report in reports), default=0)
    for report in reports:
        yield (
            f"{report.name:<{width}}  {report.seconds:7.3f} s  {report.rewrites:5} rewrites  "
            f"{report.node_delta:+5} nodes"
        )
        # A candidate is declined in every layer: one line, with the first of them.
        reasons = dict.fromkeys(item.reason for item in report.declined)
        for reason in reasons:
            items = [item for item in report.declined if item.reason == reason]
            # By its source line, since the name of a node helps only those who read the graph.
            first = items[0].line or items[0].node
            where = f"first at {first}" if len(items) > 1 else first
            yield f"{'':{width}}  left {len(items)} x as it is: {reason} ({where})"
    if any(report.declined for report in reports):
        yield "Parts that a pass left as they are run correctly, but may take more time or memory."


# A context variable instead of a global: several threads may compile at the same time.
_RUNNING: ContextVar[PassReport | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def reporting(report: PassReport) -> Iterator[PassReport]:
    """Context in which the pass of this name reports to ``report``."""
    token = _RUNNING.set(report)
    try:
        yield report
    finally:
        _RUNNING.reset(token)


def report_of(name: str) -> PassReport:
    """Return the report of the pass ``name`` if the compiler runs it, else one that is discarded.

    A pass can therefore try out other passes: their rewrites in a trial are not reported.
    """
    running = _RUNNING.get()
    return running if running is not None and running.name == name else PassReport(name)


def pass_name(user_pass: UserPass) -> str:
    """Return the name of a user's pass: that of the function, or of the callable's class."""
    return getattr(user_pass, "__name__", type(user_pass).__name__)


def checked_passes(passes: Any) -> tuple[UserPass, ...]:
    """Return the user's passes.

    Raises:
        ArgumentError: it is not a sequence of functions with distinct names.
    """
    if not isinstance(passes, (tuple, list)) or not all(map(callable, passes)):
        raise ArgumentError(
            f"passes={passes!r}: expected a list of functions that take a torch.fx.GraphModule"
        )
    names = [pass_name(each) for each in passes]
    for name in names:
        # A name identifies the pass in errors, stages and verifications.
        if names.count(name) > 1 or name in list(Pass):
            other = "the compiler's own" if name in list(Pass) else "another one's"
            raise ArgumentError(f"passes: the name {name!r} is {other}; rename the function")
    return tuple(passes)
