"""Which ranks can read the memory of each other's devices."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Place:
    """Where a rank computes.

    Attributes:
        host: its machine.
        device: the id of its device.
        barred: ids of the devices of that machine whose memory its own cannot read, among those
            that the process sees.
    """

    host: str
    device: str
    barred: frozenset[str] = frozenset()

    @classmethod
    def of(cls, device: torch.device) -> Place:
        """Return the place of this process, which computes on ``device``."""
        own = torch.cuda.current_device() if device.index is None else device.index
        others = [index for index in range(torch.cuda.device_count()) if index != own]
        barred = [i for i in others if not torch.cuda.can_device_access_peer(own, i)]
        # Not only the name: containers of two machines may have the same.
        boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
        host = f"{socket.gethostname()} {boot}"
        return cls(host, _device_id(own), frozenset(map(_device_id, barred)))


def read_each_other(places: Sequence[Place]) -> bool:
    """Return whether each of the ranks at ``places`` can read the memory of all others."""
    if len({place.host for place in places}) > 1:
        return False
    return not any(place.barred & {other.device for other in places} for place in places)


def ranks_read_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the ranks of ``group`` can read each other's memory, the same on all of them.

    They tell each other where they are, so all of them have to call this.
    """
    places: list[Any] = [None] * group.size()
    # Not part of a step: modes that count its collectives should not see it.
    with _disable_current_modes():
        dist.all_gather_object(places, Place.of(device), group)
    return read_each_other(places)


def _device_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
