"""Saved tensors in the memory of the host, copied while other calls run.

Forward: what a call sends is copied while the next call runs, and then the originals are freed.
Backward: as a call begins, it fetches what the call before it sent::

    forward     call 1 | call 2       | call 3       |
    to host            | copies of 1  | copies of 2  |
    backward    call 3       | call 2       | call 1
    from host   copies for 2 | copies for 1 |

At most two calls' tensors are on the device. On an accelerator, copies run on a stream of their
own, to and from pinned memory of PyTorch's pool; on a CPU they are plain copies. A copy is bitwise
equal and has the same strides.

``torch.ops.ao``, which Inductor uses, copies in the same way, but frees the original's memory as
soon as the copy is done, although the next call may still read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.errors import UnsupportedError

_CPU = torch.device("cpu")
_streams: dict[torch.device, torch.Stream] = {}


class _Copies:
    """Copies that were started; ``sources`` stay alive until they have arrived."""

    def __init__(self, sources: Sequence[Tensor], target: torch.device) -> None:
        self._event: torch.Event | None = None
        self._sources = sources
        # If an original changes while it is copied, the copy may have either value.
        self._versions = [source._version for source in sources]
        self._device = accelerator = sources[0].device if target == _CPU else target
        # On the current stream, on which the device's memory is reused once it is free.
        self.results = [_empty_as(source, target) for source in sources]
        with _stream_for_copies(accelerator) as stream:
            for source, result in zip(sources, self.results, strict=True):
                _span(result).copy_(_span(source), non_blocking=True)
            if stream is not None:
                self._event = stream.record_event()

    def wait(self) -> list[Tensor]:
        """Let the kernels that follow wait for the copies; return them."""
        self._let_wait()
        for source, version in zip(self._sources, self._versions, strict=True):
            if source._version != version:
                raise UnsupportedError(
                    f"a tensor of shape {tuple(source.shape)} that backward needs was changed in "
                    "place while it was copied to the host: change a copy of it, or compile "
                    "without offload=True"
                )
        self._sources = ()
        return self.results

    def __del__(self) -> None:
        # Copies that were never waited for still use memory that is freed now, and that later
        # kernels may get.
        if self._sources:
            self._let_wait()

    def _let_wait(self) -> None:
        if self._event is not None:
            # Otherwise the current device would wait, which need not be that of the tensors.
            self._event.wait(torch.accelerator.current_stream(self._device))


@contextmanager
def _stream_for_copies(device: torch.device) -> Iterator[torch.Stream | None]:
    """Enter a stream that waits for what was started so far; a CPU has none."""
    if device == _CPU:
        yield None
        return
    if device not in _streams:
        _streams[device] = torch.Stream(device)
    _streams[device].wait_stream(torch.accelerator.current_stream(device))
    with _streams[device]:
        yield _streams[device]


def _empty_as(tensor: Tensor, device: torch.device) -> Tensor:
    pinned = device == _CPU and tensor.device != _CPU
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned
    )


def _span(tensor: Tensor) -> Tensor:
    """Return the part of its storage that ``tensor`` spans, in one dim.

    A broadcast tensor, which has strides of 0, cannot be written to directly.
    """
    dims = zip(tensor.size(), tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in dims) if tensor.numel() else 0
    return tensor.as_strided((length,), (1,))


class HostTrip:
    """The tensors that one call sends to the host and fetches again.

    Autograd saves the copies, so that they are freed with its graph: those of the call itself, and
    those of the call before it, which it fetches ahead.

    Args:
        positions: positions of these tensors among what the call's forward saves.
        before: the trip of the call before in the same forward.
    """

    def __init__(self, positions: tuple[int, ...], before: HostTrip | None) -> None:
        self.positions = positions
        self._before = before
        self._leaving: _Copies | None = None
        self._arriving: _Copies | None = None
        self._device = _CPU
        self._num_before = 0

    def leave(self, saved: Sequence[Any]) -> list[Any]:
        """Begin to send tensors of ``saved``; return what autograd should save."""
        kept = list(saved)
        if self.positions:
            self._device = kept[self.positions[0]].device
            self._leaving = _Copies([kept[position] for position in self.positions], _CPU)
            for position, copy in zip(self.positions, self._leaving.results, strict=True):
                kept[position] = copy
        ahead = self._before._on_host() if self._before is not None else []
        self._num_before = len(ahead)
        return [*kept, *ahead]

    def _on_host(self) -> list[Tensor]:
        return [] if self._leaving is None else self._leaving.results

    def left(self) -> None:
        """Free the originals; called when the next call has run."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def fetch(self, saved: Sequence[Any]) -> list[Any]:
        """Return what the forward saved, from what autograd saved."""
        count = len(saved) - self._num_before
        values, ahead = list(saved[:count]), saved[count:]
        arriving, self._arriving = self._arriving, None
        if arriving is None and self.positions:  # the backward of the next call did not run
            arriving = _Copies([values[position] for position in self.positions], self._device)
        # They may be there already, from an earlier backward that ended with this call.
        if ahead and self._before is not None and self._before._arriving is None:
            self._before._arriving = _Copies(ahead, self._before._device)
        if arriving is not None:
            for position, copy in zip(self.positions, arriving.wait(), strict=True):
                values[position] = copy
        return values
