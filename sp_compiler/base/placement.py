"""Placements: how a value is distributed over the ranks of the tensor-parallel axis.

The four kinds are those of ``spmd_types``; each has a dual, the placement of its gradient
(S <-> S, P <-> R, I <-> I), so the backward of a conversion is known from its forward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_TEXT = re.compile(r"^(?:([RIP])|([ST])\((\d+)(?:\|([\d,]+)(?:/(\d+))?)?\))$")
# Not next to letters, dots or the % of nodes: a module or a value may be called "S" or "P".
_PRINTED = re.compile(r"(?<![\w.%])(?:([RIP])(?![\w.(])|([ST])\(\d+(?:\|[\d,]+(?:(/)\d+)?)?\))")
_MEANINGS = {
    "S": (
        "S(i)",
        "sharded: each rank has its part of dim i; S(i|a,b): a part of each segment a, b of it",
    ),
    "/": ("S(i|a/n)", "segment a of n units (heads), padded to the same number on every rank"),
    "P": ("P", "partial: the value is the sum over the ranks"),
    "R": ("R", "replicated: the same on every rank, while its gradient is partial"),
    "I": ("I", "invariant: the same on every rank, and its gradient too"),
    "T": ("T(n)", "sharded by rows: the first n dims flattened to one, each rank has its part"),
}


@dataclass(frozen=True, order=True)
class Placement:
    """Distribution of one value over the tensor-parallel ranks.

    Attributes:
        kind: ``"R"`` replicated, gradient partial; ``"I"`` invariant: replicated, gradient
            replicated; ``"P"`` partial sum; ``"S"`` sharded on ``dim``; ``"T"`` the first ``dim``
            dimensions flattened to rows, padded to a multiple of the world size, rows sharded
            (only while solving; in the rewritten graph the local tensor is ``S(0)``).
        dim: non-negative dimension for ``"S"``, number of flattened dimensions for ``"T"``.
        segments: for ``"S"``: global sizes of the parts of ``dim`` (a fused q, k, v), each
            sharded over all ranks; ``()`` if ``dim`` is one part. A segment whose number of units
            is not divisible by the number of ranks is padded at its end: with zeros in parameters
            and gradients, with arbitrary finite numbers in other values.
        units: number of units in each segment, such as heads, which are not split between
            ranks; 0 if every element is a unit.
    """

    kind: str
    dim: int = 0
    segments: tuple[int, ...] = ()
    units: int = 0

    def __str__(self) -> str:
        if self.kind in ("R", "I", "P"):
            return self.kind
        segments = "|" + ",".join(map(str, self.segments)) if self.segments else ""
        units = f"/{self.units}" if self.units else ""
        return f"{self.kind}({self.dim}{segments}{units})"

    # Cached: nodes hold placements as text, which passes parse thousands of times; a process has
    # only a few distinct ones.
    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Placement:
        """Invert ``str``; raises ``ValueError`` on any other text."""
        match = _TEXT.match(text)
        if match is None:
            raise ValueError(
                f"not a placement: {text!r}; expected R, I, P, S(dim), S(dim|a,b,c) or S(dim|a,b/n)"
            )
        plain, kind, dim, segments, units = match.groups()
        if plain:
            return cls(plain)
        sizes = tuple(map(int, segments.split(","))) if segments else ()
        return cls(kind, int(dim), sizes, int(units or 0))

    @property
    def dual(self) -> Placement:
        """Placement of the gradient of a value with this placement."""
        return {"R": P, "P": R}.get(self.kind, self)

    @property
    def is_sharded(self) -> bool:
        return self.kind in ("S", "T")

    @property
    def is_replicated(self) -> bool:
        """Return whether all ranks hold the same values (R and I differ only in the gradient)."""
        return self.kind in ("R", "I")

    @property
    def is_in_order(self) -> bool:
        """Return whether the ranks' parts are DTensor's own chunks of the dim, in order."""
        return len(self.segments) < 2 and not self.units

    def padded_segments(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes of the segments with their padding, over all ranks together."""
        # Several segments without units are never padded: each must be divisible.
        if len(self.segments) > 1 and not self.units:
            return self.segments
        return tuple(
            world_size * self.unit_size(segment) * -(-(self.units or segment) // world_size)
            for segment in self.segments
        )

    def unit_size(self, segment: int) -> int:
        """Return the number of elements of one unit of a segment of this size."""
        return segment // self.units if self.units else 1

    def padding(self, world_size: int) -> int:
        """Return the number of padding elements of ``dim``, over all ranks together."""
        # A fast path, since every collective of a step asks, nearly always for rows.
        if not self.segments:
            return 0
        return sum(self.padded_segments(world_size)) - sum(self.segments)

    def is_copied_for_padding(self, world_size: int) -> bool:
        """Return whether a parameter stored without padding is copied to add it.

        Otherwise there is room for padding after the part (:mod:`sp_compiler.runtime.padding`).
        """
        return bool(self.padding(world_size)) and (self.dim > 0 or len(self.segments) > 1)

    def true_parts(self, rank: int, world_size: int) -> list[int]:
        """Return the number of elements of each segment that ``rank`` has, without padding."""
        parts = []
        for segment, padded in zip(self.segments, self.padded_segments(world_size), strict=True):
            part = padded // world_size
            parts.append(min(max(segment - rank * part, 0), part))
        return parts

    def local_shape(self, shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
        """Return the shape of one rank's part of a global ``shape``; for "T", rows are rounded
        up."""
        if self.kind == "S":
            # Each segment must be divisible, not only their sum: every rank has a part of each.
            parts = self.padded_segments(world_size) or (shape[self.dim],)
            if any(part % world_size for part in parts):
                raise ValueError(
                    f"{self}: dim {self.dim} of {shape} is not divisible by {world_size}"
                )
            size = sum(parts) // world_size
            return (*shape[: self.dim], size, *shape[self.dim + 1 :])
        if self.kind == "T":
            rows = 1
            for size in shape[: self.dim]:
                rows *= size
            return ((rows + world_size - 1) // world_size, *shape[self.dim :])
        return shape

    def global_shape(self, shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
        """Invert :meth:`local_shape`, for all kinds but "T", whose amount of padding is unknown."""
        if self.kind != "S":
            return shape
        size = shape[self.dim] * world_size - self.padding(world_size)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


class Segmentation(NamedTuple):
    """Division of a dim into segments before it is sharded, see :class:`Placement`."""

    sizes: tuple[int, ...]
    units: int = 0

    def is_padded(self, world_size: int) -> bool:
        """Return whether a segment's number of units is not divisible by the number of ranks."""
        return S(0, *self).padding(world_size) > 0


R = Placement("R")
I = Placement("I")  # noqa: E741 - the literature's name
P = Placement("P")


def S(dim: int, segments: tuple[int, ...] = (), units: int = 0) -> Placement:
    """Return the placement of a value sharded on ``dim``, each of ``segments`` over all ranks."""
    # Canonical: a single segment whose elements are the units needs no number of units.
    return Placement("S", dim, segments, 0 if segments == (units,) else units)


def shard_of(size: int, dim: int, world_size: int) -> Placement:
    """Return the placement of a dim of ``size`` sharded as one part, padded if it is not
    divisible."""
    return S(dim, (size,)) if size % world_size else S(dim)


def T(num_dims: int) -> Placement:
    """Return the placement of the first ``num_dims`` dims flattened, padded and sharded."""
    return Placement("T", num_dims)


def as_value(placement: Placement, world_size: int) -> Placement:
    """Return the placement of the values regardless of gradients: R for I, including padding.

    Padding counts as part of the value, so units and a single segment are dropped.
    """
    if placement.is_replicated:
        return R  # R and I differ only in the gradient
    if placement.kind != "S" or not placement.segments:
        return placement
    padded = placement.padded_segments(world_size)
    return S(placement.dim, padded if len(padded) > 1 else ())


def legend(kinds: str) -> list[str]:
    """Return one line per kind in ``kinds``, such as "SP", with its meaning."""
    return [f"{text:<10}{meaning}" for text, meaning in map(_MEANINGS.__getitem__, kinds)]


def legend_of(lines: Iterable[str]) -> list[str]:
    """Return lines to print below ``lines``: the meaning of the placements in them, if any."""
    matches = [match for line in lines for match in _PRINTED.finditer(line)]
    printed = {kind for match in matches for kind in match.groups() if kind}
    # Always in the order of the meanings, so that all outputs have the same form.
    explained = legend("".join(kind for kind in _MEANINGS if kind in printed))
    return ["", "Placements", *(f"  {line}" for line in explained)] if explained else []
