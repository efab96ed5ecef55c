"""Checks that the ranks of a tensor-parallel group do the same thing."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.program_cache import CallKey

_REMEMBERED_KEYS = 64


def checks_enabled() -> bool:
    """Whether the user asked for a check of every call (``SP_COMPILER_CHECK=1``)."""
    return os.environ.get("SP_COMPILER_CHECK", "0") not in ("", "0")


class RankAgreement:
    """Lets the ranks of a group run, or compile, only when all of them do the same.

    A rank that needs another program than the others, compiled or not, is found before anything
    runs and every rank raises: without this it would compile alone while the others wait in a
    collective.

    Args:
        group: the ranks that must agree.
        name: of the module among those of this process, the same on every rank.
        options: what this rank compiles with, by name; must be the same on every rank.

    Attributes:
        every_call: whether each call is compared, through one tiny all-gather on the CPU. False for
            one rank, for a fake group, whose ranks exist in name only, and where the group has no
            backend for CPU tensors: a comparison on the accelerator would make it wait in every
            step, so there only compilations are compared, through the group's key-value store.
        timeout: how long to wait for the other ranks.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        name: str,
        options: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        process_group = group.process_group
        self.timeout = timeout
        self._group = group
        self._name = name
        self._options = dict(options or {})
        self._alone = process_group is None or dist.get_backend(process_group) == "fake"
        self.every_call = (
            process_group is not None
            and not self._alone
            and torch.device("cpu") in process_group._device_types
        )
        self._num_compiled = 0
        self._numbers: OrderedDict[CallKey, int] = OrderedDict()

    def check_call(self, key: CallKey) -> None:
        """Raise :class:`RankMismatchError` unless every rank is here with an equal key."""
        if not self.every_call:
            return
        with _disable_current_modes():  # it is no part of the step that a mode may be watching
            if self._everyone_has(self._number(key)):
                return
            # Only now the texts: hashes are enough while the ranks agree.
            everyone: list[dict[str, str]] = [{}] * self._group.world_size
            own = {**key.parts(), **self._options}
            dist.all_gather_object(everyone, own, group=self._group.process_group)
        raise _mismatch(everyone)

    def check_compilation(self, key: CallKey) -> None:
        """Raise :class:`RankMismatchError` unless every rank compiles for an equal key now.

        It goes through a key-value store, not through a collective, so that a rank that compiles
        alone (its input differs, the others found theirs in the cache) raises after ``timeout``
        instead of waiting for ever.
        """
        process_group = self._group.process_group
        if self.every_call or self._alone or process_group is None:
            return  # compared already, or nobody to agree with
        store = _get_process_group_store(process_group)
        prefix = f"sp_compiler/{self._name}/{self._num_compiled}"
        self._num_compiled += 1
        own = {"": _digest(key, self._options), **key.parts(), **self._options}
        store.set(f"{prefix}/{self._group.rank}", json.dumps(own))
        everyone: list[dict[str, str]] = []
        for rank in range(self._group.world_size):
            try:
                store.wait([f"{prefix}/{rank}"], self.timeout)
            except RuntimeError as error:  # which class depends on the store
                raise RankMismatchError(
                    f"rank {self._group.rank} compiles for a new kind of call ({key.describe()}), "
                    f"but rank {rank} does not after {self.timeout}: its inputs differ, or it "
                    "does not call the module. All ranks of a tensor-parallel group must get the "
                    "same inputs"
                ) from error
            everyone.append(json.loads(store.get(f"{prefix}/{rank}").decode()))
        if len({parts.pop("") for parts in everyone}) > 1:
            raise _mismatch(everyone)

    def _everyone_has(self, number: int) -> bool:
        process_group = self._group.process_group
        assert process_group is not None
        own = torch.tensor([number])
        everyone = torch.empty(self._group.world_size, dtype=torch.int64)
        try:
            process_group._allgather_base(everyone, own).wait(self.timeout)
        except RuntimeError as error:  # which class depends on the backend
            raise RankMismatchError(
                f"rank {self._group.rank} calls the module, but not every other rank of its "
                f"tensor-parallel group does after {self.timeout} (or one has failed): all of them "
                "must call it the same number of times, with the same inputs"
            ) from error
        return bool((everyone == own).all())

    def _number(self, key: CallKey) -> int:
        """63 bits that stand for the key and the options."""
        number = self._numbers.get(key)
        if number is None:
            number = int(_digest(key, self._options)[:16], 16) >> 1
            self._numbers[key] = number
            if len(self._numbers) > _REMEMBERED_KEYS:
                self._numbers.popitem(last=False)
        return number


def check_values(group: TensorParallelGroup, kind: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise unless these tensors (and other values) are bitwise equal on every rank; collective.

    Raises:
        RankMismatchError: naming the first that differs.
    """
    if group.process_group is None:
        return
    own = [(name, _digest_of_value(value)) for name, value in named]
    everyone: list[Any] = [None] * group.world_size
    dist.all_gather_object(everyone, own, group=group.process_group)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        raise RankMismatchError(
            f"{kind} {_first_difference(everyone[0], theirs)} differs between rank 0 and rank "
            f"{rank} of one tensor-parallel group; every rank must have the same (check seeds and "
            "data loading: shard data over other mesh axes only)"
        )


def _digest(key: CallKey, options: Mapping[str, str]) -> str:
    """Text that is the same on every rank for equal keys and options."""
    return hashlib.sha256(f"{key.digest()} {sorted(options.items())}".encode()).hexdigest()


def _mismatch(ranks: Sequence[Mapping[str, str]]) -> RankMismatchError:
    """The error that names what differs between ``ranks``, and its value on each of them."""
    lines = []
    for name in dict.fromkeys(name for parts in ranks for name in parts):
        holders: dict[str, list[str]] = {}
        for rank, parts in enumerate(ranks):
            holders.setdefault(parts.get(name, "none"), []).append(str(rank))
        if len(holders) > 1:
            lines += [
                f"  rank {', '.join(who)}: {name}={textwrap.shorten(value, 500)}"
                for value, who in holders.items()
            ]
    return RankMismatchError(
        "the ranks of one tensor-parallel group must get the same inputs, in the same mode, and "
        "compile with the same options:\n" + "\n".join(lines)
    )


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return repr(one[0])
    return "(their number)"


def _digest_of_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_meta:
        return f"{tuple(value.shape)} {value.dtype}"
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()}"
