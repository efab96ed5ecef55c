"""The device side of recorded steps: all code that needs CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class DeviceGraph:
    """Kernels that a function launches, recorded in a CUDA graph.

    The memory of tensors that the function makes belongs to ``pool``; it stays the graph's, and is
    written again by every replay. Graphs with the same pool must be replayed in the order in which
    they were recorded.

    Args:
        device: where the kernels run.
        pool: see :func:`memory_pool`.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], Result]) -> Result:
        """Return ``function()``, whose kernels are recorded and do not run."""
        recording = torch.cuda.graph(
            self._graph,
            pool=self._pool,
            stream=_stream(self._device),
            # Of this thread only: threads of a data loader may allocate pinned memory meanwhile.
            capture_error_mode="thread_local",
        )
        try:
            # A failed recording leaves its stream as the current one.
            with torch.cuda.stream(torch.cuda.current_stream(self._device)), recording:
                return function()
        except BaseException:
            _leave_recording(self._device)
            raise

    def replay(self) -> None:
        """Run the recorded kernels."""
        self._graph.replay()


def _leave_recording(device: torch.device) -> None:
    """Let the default generator draw again: a failed recording leaves it in the state of a
    recording, in which every random number of the process would raise an error.

    It gets a new state, because no function ends a failed recording; graphs that the user recorded
    before go on with the old one.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which graphs are recorded.

    Torch's own stream for this is one for the entire process, on the device that recorded first: it
    would record no kernels of another device.
    """
    return torch.cuda.Stream(device)


def memory_pool() -> Any:
    """Return a new pool of memory for graphs that are replayed one after another."""
    return torch.cuda.graph_pool_handle()


def can_record(device: torch.device) -> bool:
    """Return whether there are graphs on ``device``."""
    return device.type == "cuda"


def is_recording() -> bool:
    """Return whether the user is recording a graph now."""
    return torch.cuda.is_current_stream_capturing()
