"""Measurement of the machine that this process runs on, as a profile for ``hardware=``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sp_compiler.base.errors import ArgumentError
from sp_compiler.cost.hardware import Hardware, Link, hardware_of
from sp_compiler.ir.text import dtype_name
from sp_compiler.ops.communicator import Communicator, FunctionalCollectives
from sp_compiler.ops.convert import LINK_CROSSINGS
from sp_compiler.ops.dropout import dropout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MATRIX_SIZES = (256, 512, 1024, 2048, 4096, 8192)
# A matmul that takes longer than this is the last of its dtype: the next takes eight times as long.
_LONG_S = 0.05
_RANDOM_COLUMNS = 1 << 12  # of dropout's operand: about the width of activations
# The time of a small transfer is latency; that of a large one depends on its bytes.
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 64 << 20
_COPY_BYTES = 256 << 20  # a device's own memory is faster: it takes more bytes to measure
_REPEATS = 7  # the shortest counts


def profile(
    path: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    interconnect: str | Path | Hardware = "h100",
) -> Hardware:
    """Measure this machine; ``hardware=`` takes the result or the path of its file.

    Measures matmuls of square matrices of several sizes in 16, 32 and 64 bits, copies in the
    device's memory and to the host, dropout and, in a process group of several ranks, all-gathers,
    reduce-scatters and all-reduces of small and large tensors. It takes seconds to a minute; other
    work on the machine distorts the result.

    >>> sp_compiler.profile("node.toml")  # under torchrun: interconnect included
    >>> sp_compiler.plan(model, inputs, tp=8, hardware="node.toml")

    The highest rate of any size counts as the peak, on which MFU is based. For MFU as papers define
    it, write the vendor's peak into the file.

    Args:
        path: file to write; rank 0 writes it.
        device: device to measure; by default the accelerator if there is one, else the CPU.
        group: process group whose collectives are measured; all of its ranks must call this
            function. By default the default group, if there is one. It must be able to send tensors
            of ``device``.
        interconnect: profile for what is not measured: the network between nodes, and without a
            group of several ranks also the collectives.

    Returns:
        The measured profile.

    Raises:
        ArgumentError: ``interconnect`` is not a profile, ``path`` cannot be a file,
            this process has no such ``device``, or ``group`` is not a process group.
    """
    _check_path(path)
    other = hardware_of(interconnect, "interconnect")
    where = _device(device)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"group={group!r}: expected a torch.distributed.ProcessGroup, or None")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    products = {dtype_name(d): _product_tflops(d, where) for d in _DTYPES}
    measured = Hardware(
        name=_name(where),
        peak_tflops={dtype: fastest for dtype, (fastest, _) in products.items()},
        achieved_tflops={dtype: usual for dtype, (_, usual) in products.items()},
        memory_gb_per_s=_copy(where, where).gb_per_s * 2,  # read and written
        interconnect=_collectives(where, group) or other.interconnect,
        host=_copy(where, torch.device("cpu")),
        # Tensor-parallel ranks share a node: nothing crosses the network here.
        network=other.network,
        random_g_per_s=_random(where),
    )
    try:
        # First: other ranks may read the file as soon as they have the profile.
        if path is not None and (group is None or group.rank() == 0):
            measured.save(path)
    finally:
        if group is not None and group.size() > 1:
            # One profile for all: ranks that estimate differently would compile different programs.
            shared: list[Any] = [measured]
            dist.broadcast_object_list(shared, group=group, group_src=0)
            (measured,) = shared
    return measured


def _check_path(path: Any) -> None:
    # Before any measurement, which may take a minute.
    if path is None:
        return
    if not isinstance(path, (str, Path)):
        raise ArgumentError(f"path={path!r}: expected the path of a file, such as 'node.toml'")
    if not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"path={str(path)!r}: there is no folder {Path(path).parent}")
    if Path(path).is_dir():
        raise ArgumentError(f"path={str(path)!r}: it is a folder; give the name of a file in it")


def _device(device: Any) -> torch.device:
    """Return the device to measure, which this process has."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = [*filter(None, [accelerator]), torch.device("cpu")]
    if device is None:
        return present[0]
    try:
        where = torch.device(device)
        if where.type in {each.type for each in present}:
            return where
    except (RuntimeError, TypeError):
        pass
    names = " or ".join(repr(each.type) for each in present)
    raise ArgumentError(f"device={device!r}: this process has no such device; expected {names}")


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def _product_tflops(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return the highest rate of all sizes, and the rate of the largest size."""
    rates = []
    # A separate generator: the program's random state must stay as it was, and ranks of different
    # speed draw different amounts.
    generator = torch.Generator(device).manual_seed(0)
    for size in _MATRIX_SIZES:
        # Random values: a GPU multiplies ones faster, because they take less power.
        matrix = torch.randn(size, size, generator=generator, device=device).to(dtype)
        time_s = _time_s(partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix)), device)
        rates.append(2 * size**3 / 1e12 / time_s)
        if time_s > _LONG_S:
            break
    return max(rates), rates[-1]


def _random(device: torch.device) -> float:
    """Return how many random numbers dropout draws, in 1e9 per second."""
    seed = torch.zeros((), dtype=torch.int64, device=device)

    def time_us(num_bytes: int) -> float:
        x = torch.ones(num_bytes // torch.float32.itemsize, device=device)
        rows = x.view(-1, min(x.numel(), _RANDOM_COLUMNS))
        draw = partial(dropout, Communicator(None, 0, 1), rows, seed, 0.1, 0, 0, 1)
        return _time_s(draw, device) * 1e6

    # Without the launch, which takes a GPU's host about as long as the kernel.
    return _link(time_us, _COPY_BYTES, 1.0).gb_per_s / torch.float32.itemsize


def _copy(source: torch.device, target: torch.device) -> Link:
    """Measure copies of a device's memory to itself or to the host's."""
    # Pinned: from pageable memory the driver copies twice.
    pinned = source.type != "cpu" and target.type == "cpu"

    def time_us(num_bytes: int) -> float:
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device=source)
        arrived = torch.zeros(num_bytes, dtype=torch.uint8, device=target, pin_memory=pinned)
        return _time_s(partial(arrived.copy_, sent, non_blocking=True), source) * 1e6

    return _link(time_us, _COPY_BYTES, 1.0)


def _collectives(device: torch.device, group: dist.ProcessGroup | None) -> dict[str, Link]:
    if group is None or group.size() == 1:
        return {}
    world_size = group.size()
    # The same ones that a compiled module runs.
    start = FunctionalCollectives(group.group_name)

    def time_us(kind: str, num_bytes: int) -> float:
        part = torch.zeros(num_bytes // (4 * world_size), device=device)
        full = torch.zeros(part.numel() * world_size, device=device)
        run: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: start.all_gather(part, world_size)(),
            "reduce_scatter": lambda: start.reduce_scatter(full, world_size)(),
            "all_reduce": lambda: start.all_reduce(full, "sum")(),
        }
        return _time_s(run[kind], device) * 1e6

    wire_share = (world_size - 1) / world_size
    return {
        kind: _link(partial(time_us, kind), _LARGE_BYTES, crossings * wire_share)
        for kind, crossings in LINK_CROSSINGS.items()
    }


def _link(time_us: Callable[[int], float], large_bytes: int, crossings: float) -> Link:
    """Fit latency and rate to the times of a small and a large transfer."""
    latency_us = time_us(_SMALL_BYTES)
    # Latency is never all of the time, even if the noise of a busy machine makes it seem so.
    transfer_us = max(time_us(large_bytes) - latency_us, latency_us * 1e-3)
    return Link(latency_us, large_bytes * crossings / (transfer_us * 1e3))


def _time_s(function: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest of several times: other work on the machine can only make them longer."""
    function()  # warm-up: loads kernels and opens connections
    times = []
    for _ in range(_REPEATS):
        _finish(device)
        begin = time.perf_counter()
        function()
        _finish(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
