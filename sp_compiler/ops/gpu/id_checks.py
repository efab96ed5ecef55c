"""Ids out of range on a device: found there, and reported by the host one call later.

torch's own check is an assertion on the device, after which the process can no longer use it, and
which does not say what was wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compiler.ops.gpu.host_copy import HostCopy


@dataclass(frozen=True)
class IdBounds:
    """The smallest and the largest id of a lookup, both of which must be in ``range(size)``.

    Attributes:
        bounds: both, int64, shape (2,).
        what: what is looked up, for messages, with ``{}`` for the size.
    """

    bounds: Tensor
    size: int
    what: str


def require_in_range(low: int, high: int, size: int, what: str, when: str = "") -> None:
    """Raise :class:`IndexError` unless ids from ``low`` to ``high`` are in ``range(size)``.

    ``what``: as in :class:`IdBounds`; ``when``: where they came from, if not in this call.
    """
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise IndexError(f"index {wrong} is out of range for {what.format(size)}{when}")


@dataclass(frozen=True)
class _Sent:
    # Without the bounds on the device, where nothing of a forward is kept unless backward needs it.
    lookups: list[tuple[int, str]]
    copy: HostCopy
    device: torch.device
    trains: bool


class IdChecks:
    """Checks of the ids of one rank's calls.

    Attributes:
        wanted: whether a forward runs. A backward that recomputes lookups uses the ids of its
            forward, which were noted: noted again, a wrong one would be reported twice.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._noted: list[IdBounds] = []
        self._sent: list[_Sent] = []
        self._is_collecting = False

    def note(self, bounds: IdBounds) -> None:
        """Check these with the call that runs now."""
        self._noted.append(bounds)

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[IdBounds]]:
        """Context that collects what is noted, instead of checking it: it is recorded, not run."""
        before, self._noted, self._is_collecting = self._noted, [], True
        try:
            yield self._noted
        finally:
            self._noted, self._is_collecting = before, False

    def send(self) -> None:
        """Let the device report what was noted: the forward has run."""
        self.wanted = False
        if not self._noted or self._is_collecting:
            return
        noted, self._noted = self._noted, []
        device = noted[0].bounds.device
        # Nobody would read what replays of the user's graph report.
        if is_recorded(device):
            return
        lookups = [(each.size, each.what) for each in noted]
        copy = HostCopy(torch.stack([each.bounds for each in noted]))
        self._sent.append(_Sent(lookups, copy, device, torch.is_grad_enabled()))

    def settle(self) -> None:
        """Raise an error if ids of an earlier call were out of range, on every rank; else another
        forward may run.

        Raises:
            IndexError: the message has the id, and where it was to be found.
        """
        self.wanted = True
        if self._is_collecting:
            return
        self._noted = []  # of a forward that failed
        # Waiting for the device would end the recording.
        if self._sent and is_recorded(self._sent[0].device):
            return
        # The device still has to run the backward of the last call while the host waits for its
        # forward. Without a backward it would run dry, so the host waits for the call before.
        keep = 0 if self._sent and self._sent[-1].trains else 1
        while len(self._sent) > keep:
            sent = self._sent.pop(0)
            for (size, what), (low, high) in zip(sent.lookups, sent.copy.numbers(), strict=True):
                require_in_range(low, high, size, what, " in an earlier call")


def is_recorded(device: torch.device) -> bool:
    """Return whether kernels on ``device`` are recorded in a CUDA graph now, instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
