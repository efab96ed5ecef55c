"""Checks that the ranks of a tensor-parallel group run the same calls with the same inputs."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import textwrap
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.ir.text import describe_tensor
from sp_compiler.ops.gpu.host_copy import HostCopy
from sp_compiler.runtime.failures.board import FailureBoard
from sp_compiler.runtime.fingerprints import combined, fingerprint, leading_digest, strided
from sp_compiler.runtime.group import TensorParallelGroup, on_device
from sp_compiler.runtime.keys.call_key import CallKey, Constant, leaf_text
from sp_compiler.runtime.watched_collectives import outside_modes

# Inputs are compared in the first calls of a kind, where mistakes of data loading show, and then
# in every _EVERY-th call, which costs little and finds later ones (a loader that drifts).
_FIRST_CALLS, _EVERY = 3, 16
_REMEMBERED_KEYS = 64  # kinds of calls that are counted; changing sizes make more
_CALL = "call"
_INPUT = "input "


def checks_enabled() -> bool:
    """Return whether the user wants the inputs of every call to be compared."""
    return os.environ.get("SP_COMPILER_CHECK", "0") not in ("", "0")


class RankAgreement:
    """Compares what the ranks of a group are about to do; if it differs, all of them raise errors.

    Every call begins with numbers that encode its kind (shapes, modes, options), whether gradients
    are recorded, the first values of each input and, in the first calls of each kind and then in
    every 16th, all of its values. So a forward that runs on one rank only is compared with another
    call of the other ranks. No rank waits for these numbers before the program's first collective,
    which waits for the same ranks: until then nothing is sent that another rank could misinterpret.

    On an accelerator the host must not wait at all: numbers are gathered on the device, in calls
    whose values are compared, and checked in a later call. Only compilations are compared before
    they start, through the group's key-value store.

    Args:
        group: the ranks that must agree.
        kind: kind of the caller, such as "module"; all ranks create these in the same order.
        options: this rank's compile options by name, which must be the same on every rank.
        numbered: whether a call is compared only with those of the same caller.

    Attributes:
        every_call: whether each call is compared before it sends anything.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        kind: str,
        options: Mapping[str, str] | None = None,
        *,
        numbered: bool = True,
    ) -> None:
        self.every_call = group.collectives is not None
        self._group = group
        self._names: dict[FailureBoard, str] = {}
        for board in (group.board, *group.data_boards):
            if board is not None:
                self._names[board] = board.new_user(kind) if numbered else kind
        self._options = dict(options or {})
        self._kinds: OrderedDict[tuple[CallKey, str], _Kind] = OrderedDict()
        self._comparisons: list[_RankComparison] = []

    def begin_call(
        self,
        key: CallKey,
        leaves: Sequence[Any],
        names: Callable[[], list[str]],
        compiled: bool,
        hooks: str = "",
    ) -> None:
        """Compare this call and its input leaves with those of the other ranks.

        Args:
            key: key of the call.
            leaves: its flattened inputs.
            names: returns the user's names of them; called only if something differs.
            compiled: whether there is a program for it; if not, it is compared at once, so that
                either all ranks compile or none.
            hooks: which hooks run between its blocks.

        Raises:
            RankMismatchError: this call differs, or an earlier one did.
            RankFailureError: the group is unusable after a failure.
        """
        board = self._group.board
        if board is None:
            return
        board.require_usable(self._group.timeout)
        self.settle(wait=self.every_call)
        kind = self._kind(key, hooks)
        first = kind.num_calls < _FIRST_CALLS
        compared = first or kind.num_calls % _EVERY == 0 or checks_enabled()
        # Other decisions select another program; the host has waited for their values anyway.
        decides = bool(key.decisions)
        values = _values(leaves) if compared else []
        here = _Here.of(leaves) if self.every_call else _Here()

        def facts() -> dict[str, str]:
            with outside_modes():
                numbers = [f"{value.item() % 2**64:016x}" for value in values]
                given = _inputs(names(), key.leaves, leaves, numbers, here.digests)
            own = {"hooks": hooks or "none", "records gradients": str(here.grad)}
            return {**given, **key.parts(), **self._options, **own}

        if self.every_call:
            self._gather_on_host(board, kind, [here.number(), _combined(values)], facts)
        elif compared or decides:
            self._gather_on_device(kind, values, facts)
            if decides:
                self.settle()
        kind.num_calls += not self.every_call
        if compiled:
            return
        if self.every_call:
            self.settle()
        else:
            self.require_equal("compiles for a new kind of call", facts())

    def settle(self, wait: bool = True) -> None:
        """Raise :class:`RankMismatchError` if an earlier comparison found a difference.

        Without ``wait``, only complete comparisons are checked.
        """
        while self._comparisons and (wait or self._comparisons[0].arrived()):
            comparison = self._comparisons.pop(0)
            everyone = comparison.everyone()
            if everyone.count(everyone[0]) == len(everyone):
                comparison.kind.num_calls += self.every_call
                continue
            self.require_equal("finds that the ranks differ", comparison.facts())
            raise AssertionError("numbers differ but not the facts that they encode")

    def require_equal(self, purpose: str, facts: Mapping[str, str]) -> None:
        """Raise an error unless all ranks come with the same ``purpose`` and equal facts, by name.

        It uses the group's key-value store instead of a collective, so that other ranks cannot
        mistake it for one of their collectives.

        Raises:
            RankMismatchError: names the facts that differ, and the ranks; or a rank is missing.
            RankFailureError: a rank has failed.
        """
        if self._group.board is not None:
            self._meet(self._group.board, purpose, facts, _SAME_BATCH)

    def require_same_model(self, purpose: str, facts: Mapping[str, str]) -> None:
        """Like :meth:`require_equal`, of facts about the model that the ranks start with.

        Raises:
            RankMismatchError: as :meth:`require_equal`.
            RankFailureError: as :meth:`require_equal`.
        """
        if self._group.board is not None:
            self._meet(self._group.board, purpose, facts, _SAME_MODEL)

    def require_equal_over_data(self, purpose: str, facts: Mapping[str, str]) -> None:
        """Like :meth:`require_equal`, but between ranks that read different data.

        Raises:
            RankMismatchError: as :meth:`require_equal`.
            RankFailureError: as :meth:`require_equal`.
        """
        # Axis by axis: what is equal along each of them is equal over all.
        for board in self._group.data_boards:
            self._meet(board, purpose, facts, _SAME_MODEL)

    def exchanged(self, purpose: str, text: str) -> list[str]:
        """Return ``text`` of every rank of the group, in order; ``purpose`` is for messages.

        Raises:
            RankMismatchError: a rank does not arrive.
            RankFailureError: a rank has failed.
        """
        board = self._group.board
        return [text] if board is None else self._exchange(board, purpose, text)

    def _meet(self, board: FailureBoard, purpose: str, facts: Mapping[str, str], rule: str) -> None:
        ranks = self._exchange(board, purpose, json.dumps({_CALL: purpose, **facts}))
        if len(set(ranks)) > 1:
            raise _mismatch([json.loads(text) for text in ranks], f"{board.kind}, {rule}")

    def _exchange(self, board: FailureBoard, purpose: str, text: str) -> list[str]:
        return board.exchange(self._names[board], text, purpose, self._group.timeout)

    def _gather_on_host(
        self,
        board: FailureBoard,
        kind: _Kind,
        numbers: list[int],
        facts: Callable[[], dict[str, str]],
    ) -> None:
        collectives = self._group.collectives
        assert collectives is not None
        everyone = collectives.gather_numbers([kind.number, *numbers], "calls the module")
        self._comparisons.append(_RankComparison(kind, everyone, lambda: True, facts))
        board.before_next = self.settle

    def _gather_on_device(
        self, kind: _Kind, values: list[Tensor], facts: Callable[[], dict[str, str]]
    ) -> None:
        device = torch.device(self._group.device_type)
        with outside_modes():
            # full() is a kernel; a tensor made from a Python number would be copied, with a wait.
            own = torch.full((2,), kind.number, dtype=torch.int64, device=device)
            if values:
                own[1] = combined([on_device(value, device) for value in values])
            everyone = self._group.communicator.all_gather(own, "S(0)", "R").view(-1, 2)
            copy = HostCopy(everyone)

        def rows() -> list[list[int]]:
            with outside_modes():
                numbers: list[list[int]] = copy.numbers()
            return numbers

        self._comparisons.append(_RankComparison(kind, rows, copy.has_arrived, facts))

    def _kind(self, key: CallKey, hooks: str) -> _Kind:
        kind = self._kinds.get((key, hooks))
        if kind is None:
            text = f"{key.digest()} {sorted(self._options.items())} {hooks}"
            digest = hashlib.sha256(text.encode())
            kind = self._kinds[key, hooks] = _Kind(int(digest.hexdigest()[:16], 16) >> 1)
            if len(self._kinds) > _REMEMBERED_KEYS:
                self._kinds.popitem(last=False)
        # Kinds that are still called are kept, even if many others are called once.
        self._kinds.move_to_end((key, hooks))
        return kind


@dataclass
class _Kind:
    """Calls of one key with the same hooks: 63 bits that encode these and the options, and the
    number of calls so far."""

    number: int
    num_calls: int = 0


@dataclass
class _RankComparison:
    """Numbers of all ranks in flight.

    Attributes:
        kind: kind of the call.
        everyone: function that waits for the numbers, one row per rank.
        arrived: function that returns whether they are complete.
        facts: the facts that the numbers encode, by name.
    """

    kind: _Kind
    everyone: Callable[[], list[list[int]]]
    arrived: Callable[[], bool]
    facts: Callable[[], dict[str, str]]


@dataclass(frozen=True)
class _Here:
    """Facts about a call on this rank, in addition to its key, that are cheap to compute.

    Attributes:
        grad: whether gradients are recorded; ``None`` if not compared.
        digests: digests of the first values of each input on the CPU; ``None`` for others.
    """

    grad: bool | None = None
    digests: Sequence[int | None] = ()

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> _Here:
        with outside_modes():
            digests = [
                leading_digest(leaf) if type(leaf) is Tensor and leaf.is_cpu else None
                for leaf in leaves
            ]
        return cls(torch.is_grad_enabled(), digests)

    def number(self) -> int:
        return zlib.crc32(repr(self).encode())


def _values(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the fingerprint of each tensor that has values."""
    with outside_modes():
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta]
        return list(map(fingerprint, tensors))


def _combined(values: list[Tensor]) -> int:
    if not values:
        return 0
    with outside_modes():
        return int(combined(values))


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return facts about tensors for :meth:`RankAgreement.require_equal`: shapes, dtypes and
    values."""
    with torch.no_grad(), outside_modes():
        here = {name: fingerprint(value) for name, value in tensors.items() if not value.is_meta}
        # One copy to the host for all of them.
        numbers = torch.stack([value.cpu() for value in here.values()]).tolist() if here else []
    values = {
        name: f"values {number % 2**64:016x}" for name, number in zip(here, numbers, strict=True)
    }
    return {
        name: f"{describe_tensor(value)} {values.get(name, 'on meta')}"
        for name, value in tensors.items()
    }


def _inputs(
    names: Sequence[str],
    described: Sequence[Any],
    leaves: Sequence[Any],
    numbers: Sequence[str],
    digests: Sequence[int | None],
) -> dict[str, str]:
    """Return facts about inputs: those in the key, and their values if they are compared."""
    facts = {}
    remaining = iter(numbers)
    by_leaf = itertools.zip_longest(names, described, leaves, digests)
    for name, text, leaf, digest in by_leaf:
        # Constants whole: the beginnings of two texts may be the same.
        facts[f"{_INPUT}{name}"] = text.whole() if isinstance(text, Constant) else leaf_text(text)
        number = next(remaining, "") if isinstance(leaf, Tensor) and not leaf.is_meta else ""
        if not number and digest is not None:
            number = f"{digest:08x}"
        if number:
            few = ", ".join(f"{value:.6g}" for value in strided(leaf).reshape(-1)[:4].tolist())
            facts[f"{_INPUT}{name}"] += f"; first values {few}, ...{_digest(number)}"
    return facts


_SAME_BATCH = (
    "which must all make the same calls with the same inputs, mode, weights and options (a "
    "DistributedSampler gets the numbers of sp_compiler.data_shard(mesh))"
)
_SAME_MODEL = (
    "which must start with the same weights and place them in the same way: build the model from "
    "the same seed or files on all ranks, or pass initial_weights='broadcast'"
)


def _digest(number: str) -> str:
    """Return the part of a fact that distinguishes values whose first elements are equal."""
    return f" (digest of all {number})"


_DIGEST = re.compile(re.escape(_digest("")).replace(r"\)", r"[0-9a-f]+\)"))


def _lines(name: str, holders: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each value of a fact, with the ranks that have it."""
    shown = {value: _DIGEST.sub("", value) for value in holders}
    if len(set(shown.values())) < len(shown):
        shown = {value: value for value in holders}
    # A purpose is a verb phrase.
    before = " " if name == _CALL else f": {name.removeprefix(_INPUT)}: "
    return [
        f"  rank {', '.join(who)}{before}{textwrap.shorten(shown[value], 500)}"
        for value, who in holders.items()
    ]


def _mismatch(ranks: Sequence[Mapping[str, str]], where: str) -> RankMismatchError:
    """Return the error with the facts that differ between ``ranks``, and their values on each."""
    names, lines = [], []
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        holders: dict[str, list[str]] = {}
        for rank, facts in enumerate(ranks):
            holders.setdefault(facts.get(name, "none"), []).append(str(rank))
        if len(holders) > 1:
            names.append(name)
            lines += _lines(name, holders)
    shown = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
    return RankMismatchError(
        f"{shown} differ{'s' if len(names) == 1 else ''} between the ranks of one {where}:\n"
        + "\n".join(lines[:40])
    )
