"""Fallbacks that take a large share of a step, which cause a warning, or an error with
``strict``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.warn import warn
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.options import CompileOptions
from sp_compiler.planning.fallbacks import (
    all_fallbacks,
    forward_flops,
    is_replicated,
    parameter_nodes,
)

COSTLY_SHARE = 0.01
"""Share of the model's matrix FLOPs or parameter bytes below which there is no warning."""
_SHOWN_SHARE = 0.001
_MOST_LINES = 8


@dataclass(frozen=True)
class CostlyFallback:
    """A fallback that takes a large share of a step; see ``strict`` of :func:`sp_compiler.compile`.

    Attributes:
        module: path of the module in the user's model, the line in the model's own forward, or the
            name of a parameter.
        share: the replicated share, such as "31 % of the matrix FLOPs" or "an attention core".
        reason: why it is not sharded.
        advice: what to do about it.
    """

    module: str
    share: str
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.module} ({self.share}): {self.reason}. {self.advice}".rstrip()


def costly_fallbacks(compiled: CompiledProgram) -> tuple[CostlyFallback, ...]:
    """Return fallbacks that take a large share of a step, largest first.

    Shares are added up: all fallbacks together must exceed :data:`COSTLY_SHARE` of the matrix FLOPs
    or of the parameter bytes, or one must be an attention core. If some fallbacks are large, small
    ones are left out. Fallbacks that a user's hint requests do not count.
    """
    # Together, not one by one: twenty layers with 0.9 % each are a fifth of the step.
    every = list(all_fallbacks(compiled))
    products = [fallback for fallback in every if fallback.flops or fallback.is_attention]
    # An operator without a rule has no matrix FLOPs of its own, but forces gathers around it.
    causes = [fallback for fallback in every if not fallback.has_rule and not fallback.flops]
    parameters = [fallback for fallback in every if fallback.num_bytes]
    all_flops, all_bytes = _total_flops(compiled), _total_bytes(compiled)
    flops_count = sum(item.flops for item in products) > COSTLY_SHARE * all_flops
    bytes_count = sum(item.num_bytes for item in parameters) > COSTLY_SHARE * all_bytes
    costly: dict[CostlyFallback, float] = {}
    small: set[CostlyFallback] = set()
    for item in products:
        share = item.flops / all_flops if all_flops else 0.0
        # A replicated attention core is always reported: its cost grows with the square of the
        # sequence length, and the example may be short.
        if flops_count or item.is_attention:
            text = _share_text(share, is_attention=item.is_attention)
            found = CostlyFallback(item.module, text, item.reason, item.advice)
            costly[found] = share
            if share < COSTLY_SHARE and not item.is_attention:
                small.add(found)
    for item in causes if flops_count else ():
        text = "it may keep its neighbours replicated"
        costly[CostlyFallback(item.module, text, item.reason, item.advice)] = 0.0
    for item in parameters if bytes_count else ():
        share = item.num_bytes / all_bytes
        text = f"{share:.1%} of the parameter bytes"
        found = CostlyFallback(item.module, text, item.reason, item.advice)
        costly[found] = share
        if share < COSTLY_SHARE:
            small.add(found)
    # If all are small, all are listed, because together they are not small.
    if len(small) < len(costly):
        costly = {item: share for item, share in costly.items() if item not in small}
    # A stable sort: equal shares stay in graph order, which is the same on every rank.
    return tuple(sorted(costly, key=costly.__getitem__, reverse=True))


def _share_text(share: float, *, is_attention: bool) -> str:
    """Return a share of the matrix FLOPs in words."""
    # Less rounds to 0.0 %.
    text = f"{share:.1%}" if share >= _SHOWN_SHARE else f"under {_SHOWN_SHARE:.1%}"
    if not is_attention:
        return f"{text} of the matrix FLOPs"
    if share < _SHOWN_SHARE:
        return "an attention core, whose cost grows with the square of the sequence"
    return f"an attention core, {text} of the matrix FLOPs"


class FallbackCheck:
    """Warns of costly fallbacks in the programs of one module, or raises errors for them.

    Args:
        options: options of the compilation; with ``strict`` they are errors.
        rank: only rank 0 warns; errors are raised on all ranks, which have the same program.
    """

    def __init__(self, options: CompileOptions, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._known: set[str] = set()

    def __call__(self, costly: Sequence[CostlyFallback]) -> None:
        """Check those of one program.

        Raises:
            UnsupportedError: with ``strict``, naming the modules, the reasons and what to do.
        """
        # On every rank, before rank 0 warns: an error on one rank alone would hang the others.
        if self._options.strict:
            refuse_costly(costly, self._options.tp)
        # Programs for other sizes have the same fallbacks with other shares.
        new = [fallback for fallback in costly if fallback.module not in self._known]
        self._known.update(fallback.module for fallback in new)
        if new and self._rank == 0:
            warn(
                f"{_text(new, self._options.tp)}\nReplication changes no results. strict=True "
                "raises an error instead; a hint Replicate() says that a parameter is meant to be "
                "replicated."
            )


def refuse_costly(costly: Sequence[CostlyFallback], world_size: int) -> None:
    """Raise an error if there are any, for ``strict=True``.

    Raises:
        UnsupportedError: naming the modules, the reasons and what to do.
    """
    if costly:
        raise UnsupportedError(
            f"strict=True: {_text(costly, world_size)}\nWith strict=False this is only a warning; "
            "a hint Replicate() says that a parameter is meant to be replicated."
        )


def _text(costly: Sequence[CostlyFallback], world_size: int) -> str:
    """Return text with the largest of ``costly``, one per line."""
    lines = list(map(str, costly[:_MOST_LINES]))
    if len(costly) > _MOST_LINES:
        lines.append(f"and {len(costly) - _MOST_LINES} more, see plan.costly_fallbacks")
    listed = "\n  ".join(lines)
    return f"costly parts of the model are replicated on all {world_size} ranks:\n  {listed}"


def _total_bytes(compiled: CompiledProgram) -> int:
    """Return the bytes of all parameters, unsharded."""
    total = 0
    for name, node in parameter_nodes(compiled):
        value, placement = node.meta["val"], compiled.param_placements[name]
        shape = placement.global_shape(tuple(value.shape), compiled.world_size)
        total += math.prod(shape) * value.element_size()
    return total


def _total_flops(compiled: CompiledProgram) -> float:
    """Return the matrix FLOPs of all forwards in one step, unsharded."""
    total = 0.0
    for region in compiled.program.regions:
        for node in region.module.graph.nodes:
            # Graphs have the shapes of one rank: a sharded operator counts once per rank.
            ranks = 1 if is_replicated(node) else compiled.world_size
            total += ranks * forward_flops(node) * len(compiled.program.paths(region))
    return total
