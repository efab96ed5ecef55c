"""Copies of values from a device to the host, which need not wait for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of ``value`` on the host, made after the kernels that the device has yet to run."""

    def __init__(self, value: Tensor) -> None:
        device = value.device
        on_device = device.type != "cpu"
        self._values = torch.empty_like(value, device="cpu", pin_memory=on_device)
        self._values.copy_(value, non_blocking=True)
        self._event: Any = None
        if on_device:
            # An event records on the current device, which need not be that of the value.
            self._event = torch.accelerator.current_stream(device).record_event()

    def has_arrived(self) -> bool:
        """Return whether the values are there."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> Any:
        """Return the values as nested lists; wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
