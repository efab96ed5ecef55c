"""A check of every call that the ranks of a tensor-parallel group run the same program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler.base.errors import RankMismatchError
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.program_cache import CallKey
from sp_compiler.runtime.rank_checks import digest, mismatch

_REMEMBERED = 64


class CallAgreement:
    """Compares the ranks' keys before anything runs, through one tiny all-gather on the CPU.

    A rank that needs another program than the others, compiled or not, is found at once and every
    rank raises: without this it would compile alone while the others wait in a collective.

    Args:
        options: what this rank compiles with, by name; must be the same on every rank.

    Attributes:
        enabled: False for one rank, for a fake group, whose ranks exist in name only, and where the
            group has no backend for CPU tensors, for a comparison on the accelerator would make it
            wait in every step.
        timeout: how long to wait for the other ranks.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        options: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        process_group = group.process_group
        self.timeout = timeout
        self._group = group
        self._options = dict(options or {})
        self.enabled = (
            process_group is not None
            and dist.get_backend(process_group) != "fake"
            and torch.device("cpu") in process_group._device_types
        )
        self._numbers: OrderedDict[CallKey, int] = OrderedDict()

    def check(self, key: CallKey) -> None:
        """Raise :class:`RankMismatchError` unless every rank is here with an equal key."""
        if not self.enabled:
            return
        with _disable_current_modes():  # it is no part of the step that a mode may be watching
            if self._everyone_has(self._number(key)):
                return
            parts: list[dict[str, str]] = [{}] * self._group.world_size
            mine = {**key.parts(), **self._options}
            dist.all_gather_object(parts, mine, group=self._group.process_group)
        raise mismatch(parts)

    def _everyone_has(self, number: int) -> bool:
        process_group = self._group.process_group
        assert process_group is not None
        mine = torch.tensor([number])
        everyone = torch.empty(self._group.world_size, dtype=torch.int64)
        try:
            process_group._allgather_base(everyone, mine).wait(self.timeout)
        except RuntimeError as error:  # which class depends on the backend
            raise RankMismatchError(
                f"rank {self._group.rank} calls the module, but not every other rank of its "
                f"tensor-parallel group does after {self.timeout} (or one has failed): all of them "
                "must call it the same number of times, with the same inputs"
            ) from error
        return bool((everyone == mine).all())

    def _number(self, key: CallKey) -> int:
        """63 bits that stand for the key and the options."""
        number = self._numbers.get(key)
        if number is None:
            number = int(digest(key, self._options)[:16], 16) >> 1
            self._numbers[key] = number
            if len(self._numbers) > _REMEMBERED:
                self._numbers.popitem(last=False)
        return number
