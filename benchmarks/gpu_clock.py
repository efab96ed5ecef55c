"""Timestamps on an accelerator, whose kernels run asynchronously; without one, on the host."""

from __future__ import annotations

import time
from typing import Any

import torch


def mark() -> Any:
    """A timestamp: an event if kernels run asynchronously, else seconds."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))


def elapsed_ms(begin: Any, end: Any) -> float:
    """Milliseconds between two timestamps; waits for launched kernels."""
    finish()
    elapsed = (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)
    return float(elapsed)


def finish() -> None:
    """Wait for the kernels: a launch returns long before its kernel ends."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
