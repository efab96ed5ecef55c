"""The processes of a run under ``torchrun``: their group, their mesh, and where each of them is."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

import sp_compiler


class Places:
    """Places of all ranks, for those that waited for another one in vain.

    Args:
        store: of all ranks.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("places", store)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._count = 0
        self._own = "start"

    def enter(self, place: str) -> None:
        """Say that this rank is at ``place``; all ranks come to the same places in one order."""
        self._count += 1
        self._own = place
        self._store.set(str(self._rank), json.dumps([self._count, place]))

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Add to an error inside which ranks this one waited for, if it waited."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # of the store, whose process may be gone
                error.add_note(self._waits())
            raise

    def _waits(self) -> str:
        behind, beside = [], []
        for rank in range(self._world_size):
            known = self._store.check([str(rank)])
            count, place = json.loads(self._store.get(str(rank))) if known else (0, "start")
            if count < self._count:
                behind.append(f"rank {rank}, which is at {place}")
            elif count == self._count and rank != self._rank:
                beside.append(f"rank {rank}")
        if behind:
            return f"rank {self._rank} is at {self._own} and waits for {'; '.join(behind)}"
        return f"{', '.join([f'rank {self._rank}', *beside])} at {self._own}"


# Longer than what ranks of one machine start after one another.
_SECONDS_FOR_RANK_0 = 15.0


def let_rank_0_speak() -> None:
    """Wait with an error that rank 0 should find too: torchrun ends this process once it has."""
    if int(os.environ.get("RANK", "0")):
        # After it, rank 0 has no such error: it is this rank's own, and said.
        time.sleep(_SECONDS_FOR_RANK_0)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Context whose ``SystemExit`` is said by rank 0, or by the rank that is the only one."""
    try:
        yield
    except SystemExit:
        let_rank_0_speak()
        raise


class Parser(argparse.ArgumentParser):
    """A parser whose errors are said once."""

    def error(self, message: str) -> NoReturn:
        let_rank_0_speak()
        super().error(message)


@contextlib.contextmanager
def grid(args: argparse.Namespace) -> Iterator[tuple[DeviceMesh, Places]]:
    """The process group and the mesh of a run, whose ranks wait ``args.rank_timeout`` seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=args.rank_timeout)
    # Torchrun's own has the addresses of processes that were killed before a restart.
    store = sp_compiler.fresh_store(args.rank_timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )
    places = Places(store)
    try:
        mesh = mesh_of(args, device)
        # A mesh makes groups with torch's default, half an hour.
        for name in mesh.mesh_dim_names or ():
            _set_pg_timeout(timeout, mesh.get_group(name))
        with places.told():
            yield mesh, places
    finally:
        dist.destroy_process_group()


def mesh_of(args: argparse.Namespace, device: str) -> DeviceMesh:
    """The mesh of the command line, "tp" innermost: its ranks are neighbours."""
    names = ("dp_replicate", "dp_shard", "pp", "tp")
    sizes = tuple(getattr(args, name) for name in names)
    if math.prod(sizes) != dist.get_world_size():
        options = (f"--{n.replace('_', '-')} {size}" for n, size in zip(names, sizes, strict=True))
        raise SystemExit(
            f"{' x '.join(options)} are {math.prod(sizes)} processes, "
            f"torchrun started {dist.get_world_size()}"
        )
    return init_device_mesh(device, sizes, mesh_dim_names=names)
