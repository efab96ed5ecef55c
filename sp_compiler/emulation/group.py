"""A process group with one running rank, whose links take time on a virtual clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.cost.hardware import Hardware, Link, collective_us, hardware_of
from sp_compiler.emulation.clock import Arrival, Compute, VirtualClock
from sp_compiler.emulation.operator_times import OperatorTimes

_OF_EQUALS_THE_VALUE = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BACKEND = "sp_emulated"
"""Name of the backend in torch's registry."""


@contextlib.contextmanager
def emulated_group(
    world_size: int,
    gb_per_s: float | None = None,
    latency_us: float | None = None,
    *,
    hardware: str | Path | Hardware = "h100",
    compute: Compute = "modelled",
) -> Iterator[VirtualClock]:
    """Emulate rank 0 of ``world_size`` ranks in one process, with collectives on a virtual clock.

    Inside, ``compile(model, tp=world_size)`` returns a module that computes what one rank would if
    all other ranks had the same part of the parameters. Its results are not the model's; its
    shapes, its order of operators and its times are those of a rank. The clock shows how much of
    the communication is exposed:

    >>> with sp_compiler.emulated_group(8, hardware="a100") as clock:
    ...     module = sp_compiler.compile(model, tp=8, example_inputs=((ids,), {"labels": ids}))
    ...     clock.reset()
    ...     module(ids, labels=ids).loss.backward()
    >>> clock.exposed_us["backward"], clock.busy_us["backward"], clock.now_us()

    Times are calculated, so that other work on the machine does not disturb them. A collective
    starts when it is issued, or when the previous one ends; it takes its latency plus its bytes
    divided by the link's rate, and a wait before its end advances the clock to that end.
    All-gathers, reduce-scatters and all-reduces of any module or library are timed, including those
    of subgroups. Broadcasts, scatters and barriers take no time; other collectives raise an error
    in torch. The operators inside functions compiled by ``backend="inductor"`` are invisible: with
    "modelled" only the operators left to torch take time.

    Args:
        world_size: number of ranks.
        gb_per_s: rate of the link for all collectives, in 1e9 bytes per second, instead of the
            profile's.
        latency_us: latency of a collective, instead of the profile's.
        hardware: profile of the device and its links, as for :func:`sp_compiler.compile`.
        compute: ``"modelled"``: each operator takes its estimated time on ``hardware``, the same in
            every run; ``"measured"``: it takes the CPU time of this thread.

    Yields:
        The clock; times by phase are dictionaries with "forward" and "backward".

    Raises:
        ArgumentError: a default process group exists, and there can be only one; or an invalid
            argument.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
        raise ArgumentError(f"world_size={world_size!r}: expected an int of at least 2")
    if compute not in get_args(Compute):
        raise ArgumentError(f"compute={compute!r}: expected one of {get_args(Compute)}")
    if dist.is_initialized():
        raise ArgumentError(
            "emulated_group: there is a default process group, and only one can exist; call "
            "torch.distributed.destroy_process_group() first, or use another process"
        )
    device = hardware_of(hardware)
    links = {
        kind: Link(
            link.latency_us if latency_us is None else latency_us,
            link.gb_per_s if gb_per_s is None else gb_per_s,
        )
        for kind, link in device.interconnect.items()
    }
    clock = VirtualClock(replace(device, interconnect=links), world_size, compute)
    _register()
    # Options are the only way to pass something to a backend written in Python. The store is in
    # memory: there is no other process to share it with.
    dist.init_process_group(
        BACKEND, store=dist.HashStore(), rank=0, world_size=world_size, pg_options=clock
    )
    try:
        with OperatorTimes(clock) if compute == "modelled" else contextlib.nullcontext():
            yield clock
    finally:
        # The user's code may have destroyed the group itself.
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def _register() -> None:
    def create(options: Any, clock: VirtualClock | None) -> EmulatedGroup:
        # Subgroups share the link.
        if clock is None:
            world = dist.group.WORLD
            assert isinstance(world, EmulatedGroup)
            clock = world.clock
        return EmulatedGroup(options.group_rank, options.group_size, clock)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


class _Transfer(dist._Work):
    """A collective whose result exists already and which ends at ``arrival``, or at once if that is
    ``None``."""

    def __init__(
        self, results: list[Tensor], clock: VirtualClock, arrival: Arrival | None = None
    ) -> None:
        super().__init__()
        self._results = results
        self._clock = clock
        self._arrival = arrival

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._arrival is not None:
            self._clock.wait_until(self._arrival)
        return True

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result(self._results)
        return future


class EmulatedGroup(dist.ProcessGroup):
    """Collectives of a rank whose peers have the same tensors, on the link of ``clock``.

    Its methods are those that torch's collectives call, under torch's names; torch's stubs also
    list overloads that no collective calls.
    """

    def __init__(self, rank: int, size: int, clock: VirtualClock) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload without a stub
        self.clock = clock
        self._own_rank, self._num_ranks = rank, size
        self._name = ""

    def _allgather_base(self, output: Tensor, sent: Tensor, options: Any = None) -> _Transfer:
        return self._run("all_gather", [output], lambda: self._repeat(output, sent))

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], sent: list[Tensor], options: Any = None
    ) -> _Transfer:
        def fill() -> None:
            for output, part in zip(outputs, sent, strict=True):
                self._repeat(output, part)

        return self._run("all_gather", outputs, fill)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], sent: list[Tensor], options: Any = None
    ) -> _Transfer:
        def fill() -> None:
            for parts, part in zip(outputs, sent, strict=True):
                for output in parts:
                    output.copy_(part)

        return self._run("all_gather", [each for parts in outputs for each in parts], fill)

    def _reduce_scatter_base(self, output: Tensor, sent: Tensor, options: Any) -> _Transfer:
        return self.reduce_scatter_tensor_coalesced([output], [sent], options)

    # From torch 2.13 on, ``torch.distributed`` calls the two by these names.

    def all_gather_single(self, output: Tensor, sent: Tensor, options: Any = None) -> _Transfer:
        return self._allgather_base(output, sent, options)

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, options: Any) -> _Transfer:
        return self._reduce_scatter_base(output, sent, options)

    def reduce_scatter_tensor_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], sent: list[Tensor], options: Any
    ) -> _Transfer:
        def fill() -> None:
            for output, full in zip(outputs, sent, strict=True):
                rank = self._own_rank
                output.copy_(
                    full.reshape(-1)[rank * output.numel() :][: output.numel()].view_as(output)
                )
                self._reduce(output, options)

        return self._run("reduce_scatter", outputs, fill, sent)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Transfer:  # type: ignore[override]
        def fill() -> None:
            for tensor in tensors:
                self._reduce(tensor, options)

        return self._run("all_reduce", tensors, fill)

    # No step of a compiled module runs these: they take no time on the link.

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> _Transfer:  # type: ignore[override]
        return _Transfer(tensors, self.clock)

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], sent: list[list[Tensor]], options: Any = None
    ) -> _Transfer:
        # Not strict: only the source has tensors to send.
        for output, parts in zip(outputs, sent, strict=False):
            output.copy_(parts[self._own_rank])
        return _Transfer(outputs, self.clock)

    def barrier(self, options: Any = None) -> _Transfer:
        return _Transfer([], self.clock)

    def _repeat(self, output: Tensor, part: Tensor) -> None:
        output.view(self._num_ranks, -1).copy_(part.reshape(1, -1).expand(self._num_ranks, -1))

    def _reduce(self, tensor: Tensor, options: Any) -> None:
        # The sum of equal values is a multiple; the other reductions return the value itself.
        if options.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._num_ranks)
        elif not any(options.reduceOp == each for each in _OF_EQUALS_THE_VALUE):
            raise UnsupportedError(
                f"emulated_group: a reduction by {options.reduceOp.op.name}: only SUM, AVG, MIN "
                "and MAX are emulated"
            )

    def _run(
        self,
        kind: str,
        results: list[Tensor],
        fill: Callable[[], None],
        full: Sequence[Tensor] | None = None,
    ) -> _Transfer:
        # Rates of links are per byte of the global tensor: what a gather yields, a scatter takes.
        num_bytes = sum(each.numel() * each.element_size() for each in full or results)
        time_us = collective_us(num_bytes, kind, self._num_ranks, self.clock.hardware)
        # Started before the copies, which are the link's work, not the rank's.
        arrival = self.clock.start(time_us)
        fill()
        self.clock.forget_since_look()
        return _Transfer(results, self.clock, arrival)

    # Methods that torch requires of a process group written in Python.

    def rank(self) -> int:
        return self._own_rank

    def size(self) -> int:
        return self._num_ranks

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name
