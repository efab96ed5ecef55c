"""Exact choice of a split for every call of a step so that the peak fits, on plain data.

Calls run forward in order, then backward in the opposite order: the backward of call ``i`` runs
while everything saved by calls up to ``i`` is live, its forward while everything saved by earlier
calls is. What a call sends to the host is live until the next call's forward has run, and again
from the start of the next call's backward. A dynamic program over the calls tracks the bytes saved
so far, and what the last call sent. It drops partial solutions that another dominates in bytes and
cost, and those that, by a lower bound, end worse than a known solution.

A 0/1 program of calls x splits (``python -m benchmarks.solver_ways``) finds the same time and
proves it, except for one limit of GPT-3, at which it gave up after a minute with a gap of 2e-4. But
HiGHS does not exploit equal layers: it takes 0.4 to 4.7 s of CPU for the 48 layers of a 22B GPT,
where this takes 0.4 s, and 2.5 to 6.7 s for GPT-3's 96, where this takes 1.4 s, of 7 and 11 s of
compilation; and finding the smallest peak among the fastest solutions takes it as long again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sp_compiler.base.storage import Storage

Shared = frozenset[Storage]
_Key = tuple[Shared, "Sent"]
_BEAM = 32  # labels per step in the guess that the exact search starts from


@dataclass(frozen=True)
class Sent:
    """Storages that a call sends to the host.

    Attributes:
        own_bytes: bytes of those that are on the device only for this call.
        shared: those that are some call's results.
    """

    own_bytes: int = 0
    shared: Shared = field(default_factory=frozenset)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them, which backward fetches."""
        return self.own_bytes + sum(storage.num_bytes for storage in self.shared)


NOTHING_SENT = Sent()


@dataclass(frozen=True)
class Split:
    """One way to split a call.

    Attributes:
        time_us: time of its forward and backward.
        own_bytes: bytes saved by only this call.
        shared: saved storages that are some call's results, which others may save or use.
        forward_bytes: peak of the forward, in addition to its arguments.
        backward_bytes: the same of the backward.
        sent: what goes to the host.
    """

    time_us: float
    own_bytes: int
    shared: Shared
    forward_bytes: int
    backward_bytes: int
    sent: Sent = NOTHING_SENT


@dataclass(frozen=True)
class CallSplits:
    """One call.

    Attributes:
        splits: the choices.
        before: sets of storages that are live when the forward runs, apart from what is saved.
        after: the same at moments when its results exist.
        inside: the same at moments when the backward runs.
        behind: the same at moments when the results of the backward exist.
    """

    splits: tuple[Split, ...]
    before: frozenset[Shared]
    after: frozenset[Shared]
    inside: frozenset[Shared]
    behind: frozenset[Shared]


def cheapest(calls: Sequence[CallSplits], limit_bytes: int) -> list[int] | None:
    """Return the split of each call with the least time and a peak of at most ``limit_bytes``.

    Of equally fast ones it has the smallest peak, so a smaller limit never leads to a larger peak
    or to less time. ``None`` if nothing fits.
    """
    # A good solution first: the exact search drops whatever cannot end within its time.
    guess = _Search(calls, limit_bytes, width=_BEAM).run()
    best = _Search(calls, limit_bytes, at_most=None if guess is None else _us(calls, guess)).run()
    # The smallest peak of the fastest solutions: a smaller budget must never have a larger peak.
    smaller = best
    while smaller is not None:
        best = smaller
        smaller = _Search(calls, peak_bytes(calls, best) - 1, at_most=_us(calls, best)).run()
    return best


def is_fastest(calls: Sequence[CallSplits], picks: Sequence[int]) -> bool:
    """Return whether no choice of splits, whatever its peak, takes less time than ``picks``."""
    least = sum(min(_units(split.time_us) for split in call.splits) for call in calls)
    return _us(calls, picks) == least


def smallest(calls: Sequence[CallSplits]) -> list[int]:
    """Return the split of each call with the smallest peak."""
    picks = _Search(calls, None).run()
    assert picks is not None  # without a limit everything fits
    return picks


def peak_bytes(calls: Sequence[CallSplits], picks: Sequence[int]) -> int:
    """Return the peak of live bytes."""
    return max(live for _, live in needs(calls, picks))


def needs(calls: Sequence[CallSplits], picks: Sequence[int]) -> Iterable[tuple[int, int]]:
    """(bytes kept up to and by it, live bytes) of each call at its worst moment."""
    # One number for what calls save for themselves; a result that several calls may save counts
    # once, which requires a set.
    own, shared, sent = 0, Shared(), NOTHING_SENT
    for call, pick in zip(calls, picks, strict=True):
        split = call.splits[pick]
        before = own + _before(call, split, shared, sent)
        own, shared = own + split.own_bytes, shared | split.shared
        kept = own + sum(storage.num_bytes for storage in shared)
        yield kept, max(before, own + _after(call, split, shared, sent))
        sent = split.sent


def _us(calls: Sequence[CallSplits], picks: Sequence[int]) -> int:
    return sum(_units(call.splits[pick].time_us) for call, pick in zip(calls, picks, strict=True))


def _units(time_us: float) -> int:
    """Return integer picoseconds, so that sums do not depend on the order."""
    return round(time_us * 1e6)


def _before(call: CallSplits, split: Split, shared: Shared, sent: Sent) -> int:
    """Bytes while the forward runs; ``sent``: by the call before, as in ``_after``."""
    return split.forward_bytes + sent.own_bytes + _most(call.before, shared | sent.shared)


def _after(call: CallSplits, split: Split, shared: Shared, sent: Sent) -> int:
    """Bytes from the end of the forward until the backward has run."""
    leaving = sent.own_bytes + split.sent.own_bytes
    after = leaving + _most(call.after, shared | sent.shared | split.sent.shared)
    # Fetched tensors are copies: it does not matter whether the originals are live elsewhere.
    fetched = sent.num_bytes + split.sent.num_bytes
    inside = split.backward_bytes + fetched + _most(call.inside, shared) if call.inside else 0
    behind = fetched + _most(call.behind, shared) if call.behind else 0
    return max(after, inside, behind)


def _most(live: Iterable[Shared], shared: Shared) -> int:
    return max((sum(s.num_bytes for s in each | shared) for each in live), default=0)


@dataclass
class _Labels:
    """Partial solutions for the first calls: arrays of own bytes, cost and predecessor."""

    own: Any
    cost: Any
    came: Any
    """(number of the set of shared storages, row, split) before the last call."""


class _Search:
    """The dynamic program. With a limit the cost is time, without one it is the peak.

    Args:
        at_most: time in picoseconds; what cannot end at or below it is dropped.
        width: continue with only the most promising few, which may miss the best.
    """

    def __init__(
        self,
        calls: Sequence[CallSplits],
        limit_bytes: int | None,
        *,
        at_most: int | None = None,
        width: int | None = None,
    ) -> None:
        self.calls = calls
        self.limit = limit_bytes
        self.at_most = at_most
        self.width = width
        self.first, self.settled = _lifetimes(calls)
        self.rest = self._least_needs()
        self.bound = self._bound(limit_bytes) if limit_bytes is not None else None
        self.history: list[list[_Labels]] = []

    def run(self) -> list[int] | None:
        start = _Labels(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 3), np.int64))
        # By the shared storages saved so far, which determine how much a later call adds, and by
        # what the last call sent.
        labels = {(Shared(), NOTHING_SENT): start}
        for index in range(len(self.calls)):
            labels = self._step(index, labels)
            self.history.append(list(labels.values()))
        if not labels:
            return None
        # Labels are sorted by bytes with falling costs: the last row of each costs least.
        _, number = min((ends.cost[-1], number) for number, ends in enumerate(labels.values()))
        picks, row = [], -1
        for step in reversed(self.history):
            number, row, pick = step[number].came[row]
            picks.append(int(pick))
        return picks[::-1]

    def _step(self, index: int, labels: dict[_Key, _Labels]) -> dict[_Key, _Labels]:
        """Extend ``labels``, which end before call ``index``, by each of its splits."""
        extended: dict[_Key, list[_Labels]] = {}
        call = self.calls[index]
        for number, ((shared, sent), label) in enumerate(labels.items()):
            for pick, split in enumerate(call.splits):
                joint = shared | split.shared
                own = label.own + split.own_bytes
                need = np.maximum(
                    label.own + _before(call, split, shared, sent),
                    own + _after(call, split, joint, sent),
                )
                # A storage that no later call can save or see is added to the call's own bytes: its
                # identity no longer matters, and labels that differ in it can be compared.
                settled = {storage for storage in joint if self.settled[storage] <= index}
                own = own + sum(storage.num_bytes for storage in settled)
                if self.limit is None:
                    # Counts the least need of the rest too: labels compare by how they can end.
                    cost = np.maximum(label.cost, np.maximum(need, own + self.rest[index + 1]))
                    rows = np.arange(len(own))
                else:
                    cost = label.cost + _units(split.time_us)
                    fits = (need <= self.limit) & (own + self.rest[index + 1] <= self.limit)
                    if self.bound is not None and self.at_most is not None:
                        # One picosecond of slack: the bound is a float, and rounding must not drop
                        # the very solution that set the limit.
                        fits &= self.bound.total(index + 1, own, cost) <= self.at_most + 1
                    rows = np.flatnonzero(fits)
                came = np.stack(
                    [np.full_like(rows, number), rows, np.full_like(rows, pick)], axis=1
                )
                if len(rows):
                    label_rows = _Labels(own[rows], cost[rows], came)
                    extended.setdefault((joint - settled, split.sent), []).append(label_rows)
        return {
            key: self._narrowed(index + 1, _undominated(each)) for key, each in extended.items()
        }

    def _narrowed(self, index: int, labels: _Labels) -> _Labels:
        """Keep only the ``width`` labels with the least bound, if there is a width."""
        if self.width is None or self.bound is None or len(labels.own) <= self.width:
            return labels
        order = np.argsort(self.bound.total(index, labels.own, labels.cost), kind="stable")
        rows = np.sort(order[: self.width])
        return _Labels(labels.own[rows], labels.cost[rows], labels.came[rows])

    def _bound(self, limit_bytes: int) -> _Bound:
        """The tightest of the bounds that price bytes at the rate of some pair of splits.

        As a function of the rate, the bound is piecewise linear with breakpoints at these rates: it
        is greatest at one of them, or at 0.
        """
        kept = [
            [
                (split.own_bytes + self._for_itself(index, split), _units(split.time_us))
                for split in call.splits
            ]
            for index, call in enumerate(self.calls)
        ]
        room = [limit_bytes - rest for rest in self.rest[1:]]
        pairs = {pair for ways in kept for pair in itertools.combinations(sorted(set(ways)), 2)}
        rates = {
            (slow - fast) / (more - less) for (less, slow), (more, fast) in pairs if more > less
        }
        bounds = (
            _Bound.of(kept, room, rate) for rate in sorted({max(0.0, r) for r in rates} | {0.0})
        )
        return max(bounds, key=lambda bound: bound.least)

    def _least_needs(self) -> list[int]:
        """For each call the least bytes that it and those after it add to the bytes kept before."""
        # Backwards, each split with the best that can follow it; shared storages count as free,
        # because an earlier call may have saved them.
        none, nothing = Shared(), NOTHING_SENT
        rest = [0]
        for index in reversed(range(len(self.calls))):
            call = self.calls[index]
            least = min(
                max(
                    _before(call, split, none, nothing),
                    split.own_bytes + _after(call, split, none, nothing),
                    split.own_bytes + self._for_itself(index, split) + rest[-1],
                )
                for split in call.splits
            )
            rest.append(least)
        return rest[::-1]

    def _for_itself(self, index: int, split: Split) -> int:
        """Bytes of shared storages that only this call may keep and that die with their users."""
        return sum(
            storage.num_bytes
            for storage in split.shared
            if self.first[storage] == self.settled[storage] == index
        )


@dataclass
class _Bound:
    """A lower bound on the time of all calls, by pricing the bytes kept up to some call.

    The price turns the limit in bytes into a term of the objective (Lagrangian relaxation): for any
    price, the result is at most the time of any solution that fits.

    ``rest[i]``: priced time of calls from ``i`` on, minus the price of all the room there is.
    """

    rest: Any
    rate: Any
    least: float

    @classmethod
    def of(
        cls, kept: Sequence[Sequence[tuple[int, int]]], room: Sequence[int], rate: float
    ) -> _Bound:
        priced = np.array([min(cost + rate * own for own, cost in ways) for ways in kept])
        plain = np.array([float(min(cost for _, cost in ways)) for ways in kept])
        after = np.append(np.cumsum(plain[::-1])[::-1], 0.0)
        # Memory fills up call by call, and each call has its own limit: bytes of calls after the
        # tightest one are free.
        ends = np.cumsum(priced) + after[1:] - rate * np.array(room, dtype=float)
        end = int(np.argmax(ends))  # the call up to which bytes have a price
        rest = after.copy()
        rest[: end + 1] = (
            np.cumsum(priced[end::-1])[::-1] + after[end + 1] - rate * float(room[end])
        )
        rates = np.where(np.arange(len(kept) + 1) <= end, rate, 0.0)
        return cls(rest, rates, float(ends[end]))

    def total(self, index: int, own: Any, cost: Any) -> Any:
        """Lower bound on the time of all calls, when those before ``index`` keep ``own``."""
        return cost + self.rest[index] + self.rate[index] * own


def _lifetimes(calls: Sequence[CallSplits]) -> tuple[dict[Storage, int], dict[Storage, int]]:
    """The first call that may keep a storage; the last that may, or that sees it live anyway."""
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for index, call in enumerate(calls):
        for split in call.splits:
            for storage in split.shared:
                first.setdefault(storage, index)
        for live in (
            *call.before,
            *call.after,
            *call.inside,
            *call.behind,
            *(split.shared for split in call.splits),
        ):
            last.update(dict.fromkeys(live, index))
        for split in call.splits:  # live until the next call has run
            last.update(dict.fromkeys(split.sent.shared, index + 1))
    return first, last


def _undominated(several: Sequence[_Labels]) -> _Labels:
    """Labels of ``several`` sorted by own bytes, without any that costs no less than one before."""
    own = np.concatenate([each.own for each in several])
    cost = np.concatenate([each.cost for each in several])
    came = np.concatenate([each.came for each in several])
    order = np.lexsort((cost, own))
    own, cost, came = own[order], cost[order], came[order]
    better = np.ones(len(cost), bool)
    better[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    return _Labels(own[better], cost[better], came[better])
