"""Run a function on several gloo ranks, each a process, and bring the results back."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_TIMEOUT = timedelta(minutes=3)
# Seconds to import, so done once: ranks are forks of a process that does nothing else.
_PRELOADED = [
    "tests.models.architectures",
    "tests.helpers.parity",
    "tests.models.zoo",
    "tests.helpers.warm",
]


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, start_method: str = "forkserver"
) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` processes of a gloo group; the results by rank.

    ``function`` is a module's top-level function; its result is saved with ``torch.save``. A
    collective that waits longer than ``_TIMEOUT`` fails. With ``start_method="fork"`` the processes
    are copies of this one, which must not have threads, and ``args`` anything.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the first rank's error, with its traceback.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _rank,
            (world_size, folder, function, args),
            nprocs=world_size,
            start_method=start_method,
        )
        return [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)
        ]


def launch(num_processes: int, logs: Path, function: Callable[..., Any], *args: Any) -> None:
    """Run ``function(*args)`` on processes of torchrun's agent, which writes what they print.

    They are forks of a process that has imported everything, where torchrun's own would do it each.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: one has failed.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        monitor_interval=0.1,
        max_restarts=0,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(str(logs), Std.ALL),
    )
    elastic_launch(config, function)(*args)


def run_on_copies(
    world_size: int, before: Callable[[], Any], function: Callable[..., Any], *args: Any
) -> list[Any]:
    """As :func:`run_on_ranks`, on copies of one process that has called ``before`` already.

    What that leaves in a module, such as programs, all ranks have. It must start no threads.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    # Autograd of a CUDA build does not run in a copy of a process that has used it: each rank calls
    # ``before`` for itself there.
    copies = 1 if torch.backends.cuda.is_built() else world_size
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _prepared,
            (copies, world_size, folder, before, function, args),
            nprocs=world_size // copies,
            start_method="forkserver",
        )
        return [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)
        ]


def _prepared(
    rank: int,
    copies: int,
    world_size: int,
    folder: str,
    before: Callable[[], Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    before()
    if copies == 1:
        _rank(rank, world_size, folder, function, args)
    else:
        multiprocessing.start_processes(
            _rank, (world_size, folder, function, args), copies, start_method="fork"
        )


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    try:
        torch.save(function(*args), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
    # Not the interpreter's own exit: gloo's threads sometimes abort the process while it tears down
    # ("terminate called without an active exception"), after all the work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
