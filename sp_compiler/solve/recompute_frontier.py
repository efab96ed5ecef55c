"""Choice of the saved tensors as a 0/1 linear program on plain data, without graphs or operators.

Every value of a forward is saved, or sent to the host and fetched in backward, or recomputed when
backward needs it, or none of these. A recomputed value needs each of its parents saved, sent or
recomputed. The link to the host carries what fits into a given time. Solved by HiGHS through
``scipy.optimize.milp``.

Without a limit in bytes the program is a minimum cut. networkx finds the same corners of the
frontier (16 regions of 4 models, ``python -m benchmarks.solver_ways``), but takes 3.0 s of CPU
where HiGHS takes 1.5 s. Between the corners, below a limit, the problem is a knapsack, which no cut
solves: cuts could not replace the linear programs, only add to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

_STEPS = 12  # limits between the ends; each is one more program to solve
# HiGHS stops at an objective within 1e-6 of the best: the longest time is scaled to this value.
_RESOLUTION = 1e4
_TIE = 1e-8  # weight of the other criterion, relative to its largest value, which breaks ties


@dataclass(frozen=True)
class ForwardValue:
    """One value of the forward, after its parents.

    Attributes:
        parents: positions of the values that it is computed from; those that are always there
            (parameters, the user's inputs) are left out.
        num_bytes: bytes of its storage, 0 if another value owns it.
        time_us: time to recompute it.
        needed: whether backward reads it.
        can_keep: whether it may be saved; a view may not, its base may.
        can_repeat: whether it may be recomputed.
        can_send: whether it may be sent to the host.
        sent_bytes: bytes that count if it is sent, because it is on the device until the copy ends.
        send_us: time of the copy to the host, on the link.
        beside_us: time by which the copies there and back delay concurrent kernels.
    """

    parents: tuple[int, ...]
    num_bytes: int
    time_us: float
    needed: bool = False
    can_keep: bool = True
    can_repeat: bool = True
    can_send: bool = False
    sent_bytes: int = 0
    send_us: float = 0.0
    beside_us: float = 0.0


@dataclass(frozen=True)
class Choice:
    """``kept`` and ``sent``: positions of the values that are saved, and of those that are sent to
    the host, only ones that backward needs."""

    kept: frozenset[int]
    num_bytes: int
    time_us: float
    sent: frozenset[int] = frozenset()


def evaluate(
    values: Sequence[ForwardValue], kept: frozenset[int], sent: frozenset[int] = frozenset()
) -> Choice | None:
    """Return the cost of saving ``kept`` and sending ``sent``; ``None`` if a value that cannot be
    recomputed would have to be."""
    used: set[int] = set()
    repeated: set[int] = set()
    # From what backward reads: a kept value that the walk does not reach is not worth its bytes.
    stack = [index for index, value in enumerate(values) if value.needed]
    while stack:
        index = stack.pop()
        if index in used or index in repeated:
            continue
        if index in kept or index in sent:
            used.add(index)
            continue
        if not values[index].can_repeat:
            return None
        repeated.add(index)
        stack.extend(values[index].parents)
    kept, sent = frozenset(used & kept), frozenset(used & sent - kept)
    num_bytes = sum(values[index].num_bytes for index in kept)
    num_bytes += sum(values[index].sent_bytes for index in sent)
    # Sorted: a sum of floats depends on the order, and every rank has to come to the same time.
    time_us = sum(values[index].time_us for index in sorted(repeated))
    time_us += sum(values[index].beside_us for index in sorted(sent))
    return Choice(kept, num_bytes, time_us, sent)


def frontier(values: Sequence[ForwardValue], host_us: float = 0.0) -> list[Choice]:
    """Return Pareto-optimal choices, from the smallest to the fastest.

    All corners of the convex hull of (bytes, time), which make up the best mixtures over many equal
    blocks, and the cheapest below each of some evenly spaced limits.

    Args:
        host_us: time in which the link can send to the host what one forward makes; 0 if nothing is
            sent.
    """
    program = SavingProgram(values, host_us)
    # The ends first: every other choice lies between them in bytes and in time.
    small, fast = program.solve(us_per_byte=np.inf), program.solve()
    if small is None or fast is None or small.num_bytes >= fast.num_bytes:
        return [choice for choice in (fast,) if choice is not None]
    choices = {small, fast, *_corners(program, small, fast)}
    # A single block cannot mix: between two corners it needs a choice that is on no corner.
    for step in range(1, _STEPS):
        limit = small.num_bytes + (fast.num_bytes - small.num_bytes) * step // _STEPS
        choices.add(program.solve(limit_bytes=limit) or small)
    best: list[Choice] = []
    # By the kept values last, so that the order of a set does not decide between equal choices.
    for choice in sorted(
        choices,
        key=lambda item: (item.num_bytes, item.time_us, sorted(item.kept), sorted(item.sent)),
    ):
        if not best or choice.time_us < best[-1].time_us:
            best.append(choice)
    return best


def _corners(program: SavingProgram, small: Choice, fast: Choice) -> set[Choice]:
    """Corners of the hull between two choices."""
    # The slope of the line through both: a corner between them is the choice farthest below it.
    slope = (small.time_us - fast.time_us) / (fast.num_bytes - small.num_bytes)
    between = program.solve(us_per_byte=slope)
    assert between is not None  # the ends are solutions

    def height(choice: Choice) -> float:
        return choice.time_us + slope * choice.num_bytes

    # By more than rounding: otherwise a point on the line would be split forever.
    beyond = height(between) < height(small) * (1 - 1e-9)
    if not beyond or not small.num_bytes < between.num_bytes < fast.num_bytes:
        return set()
    return {between, *_corners(program, small, between), *_corners(program, between, fast)}


class SavingProgram:
    """The linear program; columns: for each value whether it is kept, then whether recomputed,
    then, with a link to the host, whether it is sent.

    The arguments are those of :func:`frontier`.
    """

    def __init__(self, values: Sequence[ForwardValue], host_us: float = 0.0) -> None:
        self.values = values
        self.host_us = host_us
        self.parts = 3 if host_us else 2
        self.count = len(values)
        self.num_bytes = np.array([value.num_bytes for value in values], dtype=float)
        self.time_us = np.array([value.time_us for value in values])
        self.sent_bytes = np.array([value.sent_bytes for value in values], dtype=float)
        sizes = np.concatenate([self.num_bytes, self.sent_bytes])
        self.largest_bytes = max(1.0, sizes.max(initial=0.0))
        self.beside_us = np.array([value.beside_us for value in values])
        times = np.concatenate([self.time_us, self.beside_us])
        self.longest_us = max(1e-9, times.max(initial=0.0))

    def solve(self, limit_bytes: int | None = None, us_per_byte: float = 0.0) -> Choice | None:
        """Return the choice of least time plus ``us_per_byte`` for what is kept; infinite: of least
        bytes. ``None`` if nothing fits into ``limit_bytes``."""
        if not self.count:
            return Choice(frozenset(), 0, 0.0)
        # Scaled to 1: the tolerances of HiGHS are absolute, and with gigabytes in the same program
        # microseconds would be below them.
        sizes, times = self.num_bytes / self.largest_bytes, self.time_us / self.longest_us
        sent_sizes, delays = self.sent_bytes / self.largest_bytes, self.beside_us / self.longest_us
        # Ties in one criterion are broken by the other, so that no answer wastes what is free.
        if np.isinf(us_per_byte):
            cost = [sizes, _TIE * times, sent_sizes + _TIE * delays]
        else:
            weight = us_per_byte * self.largest_bytes / self.longest_us
            cost = [(weight + _TIE) * sizes, times, (weight + _TIE) * sent_sizes + delays]
        most = np.inf if limit_bytes is None else limit_bytes
        can = [
            (
                value.can_keep and value.num_bytes <= most,
                value.can_repeat,
                value.can_send and value.sent_bytes <= most,
            )
            for value in self.values
        ]
        upper = np.array(can, dtype=float).T[: self.parts]
        result = milp(
            _RESOLUTION * np.concatenate(cost[: self.parts]),
            constraints=self._constraints(limit_bytes),
            # "Recomputed" would be integral once the others are. But HiGHS prints to stdout when it
            # has to repair a solution, as it does with continuous columns, or after its presolve.
            integrality=1,
            bounds=Bounds(0, np.concatenate(upper)),
            options={"mip_rel_gap": 1e-12, "presolve": False},
        )
        if result.x is None:
            return None
        kept, _, *sent = (
            frozenset(map(int, np.flatnonzero(part > 0.5)))
            for part in np.split(result.x, self.parts)
        )
        # Counted exactly, not read from the solver's floats.
        choice = evaluate(self.values, kept, *sent)
        if choice is None or limit_bytes is None or choice.num_bytes <= limit_bytes:
            return choice
        # Sizes more than six digits apart: rounding allowed too much. Retry with a limit that is
        # lower by the excess.
        return self.solve(2 * limit_bytes - choice.num_bytes, us_per_byte)

    def _constraints(self, limit_bytes: int | None) -> list[LinearConstraint]:
        """Rows of coefficients, each with a lower bound."""
        rows: list[list[tuple[int, float]]] = []
        lower: list[float] = []
        for index, value in enumerate(self.values):
            if value.needed:
                rows.append(self._there(index))
                lower.append(1.0)
            for parent in value.parents:  # available if this one is recomputed
                rows.append([*self._there(parent), (self.count + index, -1.0)])
                lower.append(0.0)
        if self.host_us:
            sends = [(2 * self.count + i, value.send_us) for i, value in enumerate(self.values)]
            rows.append([(column, -send_us / self.host_us) for column, send_us in sends if send_us])
            lower.append(-1.0)
        if limit_bytes is not None:
            # In multiples of the greatest common divisor, the largest coefficient 1, and half a
            # multiple more than allowed: HiGHS tolerates violations of a row by 1e-6, and prints to
            # stdout if coefficients of millions force it to repair a solution.
            sizes = {index: value.num_bytes for index, value in enumerate(self.values)}
            if self.host_us:
                sent = 2 * self.count
                sizes |= {sent + index: value.sent_bytes for index, value in enumerate(self.values)}
            # A value that alone exceeds the limit is left out: its upper bound is 0.
            sizes = {index: size for index, size in sizes.items() if 0 < size <= limit_bytes}
            unit, largest = math.gcd(*sizes.values()) or 1, max(sizes.values(), default=1)
            rows.append([(index, -size / largest) for index, size in sizes.items()])
            lower.append(-(limit_bytes // unit + 0.5) * unit / largest)
        entries = [(r, c, f) for r, row in enumerate(rows) for c, f in row]
        if not entries:
            return []
        r, c, f = zip(*entries, strict=True)
        matrix = csr_array((f, (r, c)), shape=(len(rows), self.parts * self.count))
        return [LinearConstraint(matrix, np.array(lower), np.inf)]

    def _there(self, index: int) -> list[tuple[int, float]]:
        """Terms of which one is 1 if backward has the value: kept, recomputed or sent."""
        return [(index + part * self.count, 1.0) for part in range(self.parts)]
