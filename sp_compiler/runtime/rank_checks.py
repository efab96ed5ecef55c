"""Checks that the ranks of a tensor-parallel group do the same thing."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.program_cache import CallKey


def checks_enabled() -> bool:
    """Whether the user asked for a check of every call (``SP_COMPILER_CHECK=1``)."""
    return os.environ.get("SP_COMPILER_CHECK", "0") not in ("", "0")


class CompileAgreement:
    """Lets the ranks compile only when all of them are about to compile the same.

    It goes through the group's key-value store, not through a collective, so that a rank that
    compiles alone (its input differs, the others found theirs in the cache) raises after
    ``timeout`` instead of waiting for ever. ``options`` is what this rank compiles with, by name.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        name: str,
        options: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        self._group = group
        self._options = dict(options or {})
        self._name = name
        self._timeout = timeout
        self._count = 0

    def check(self, key: CallKey) -> None:
        """Raise :class:`RankMismatchError` unless every rank is here with equal key and options."""
        process_group = self._group.process_group
        if process_group is None or dist.get_backend(process_group) == "fake":
            return  # nobody to agree with: a fake group's ranks exist in name only
        store = _get_process_group_store(process_group)
        prefix = f"sp_compiler/{self._name}/{self._count}"
        self._count += 1
        mine = {"": digest(key, self._options), **key.parts(), **self._options}
        store.set(f"{prefix}/{self._group.rank}", json.dumps(mine))
        everyone: list[dict[str, str]] = []
        for rank in range(self._group.world_size):
            try:
                store.wait([f"{prefix}/{rank}"], self._timeout)
            except RuntimeError as error:  # which class depends on the store
                raise RankMismatchError(
                    f"rank {self._group.rank} compiles for a new kind of call ({key.describe()}), "
                    f"but rank {rank} does not after {self._timeout}: its inputs differ, or it "
                    "does not call the module. All ranks of a tensor-parallel group must get the "
                    "same inputs"
                ) from error
            everyone.append(json.loads(store.get(f"{prefix}/{rank}").decode()))
        if len({parts.pop("") for parts in everyone}) > 1:
            raise mismatch(everyone)


def digest(key: CallKey, options: Mapping[str, str]) -> str:
    """The same text on every rank for equal keys and options."""
    return hashlib.sha256(f"{key.digest()} {sorted(options.items())}".encode()).hexdigest()


def mismatch(ranks: Sequence[Mapping[str, str]]) -> RankMismatchError:
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


def check_values(group: TensorParallelGroup, what: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise unless these tensors (and other values) are bitwise equal on every rank; collective.

    Raises:
        RankMismatchError: naming the first that differs.
    """
    if group.process_group is None:
        return
    mine = [(name, _digest(value)) for name, value in named]
    everyone: list[Any] = [None] * group.world_size
    dist.all_gather_object(everyone, mine, group=group.process_group)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        raise RankMismatchError(
            f"{what} {_first_difference(everyone[0], theirs)} differs between rank 0 and rank "
            f"{rank} of one tensor-parallel group; every rank must have the same (check seeds and "
            "data loading: shard data over other mesh axes only)"
        )


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return repr(one[0])
    return "(their number)"


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_meta:
        return f"{tuple(value.shape)} {value.dtype}"
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()}"
