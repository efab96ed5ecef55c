"""Report of a machine's hardware and software, and whether the compiler works on it."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated

import torch
import typer
from packaging.requirements import Requirement
from torch import Tensor, nn

from sp_compiler.base.units import bytes_text
from sp_compiler.verification.verify import verify


@dataclass(frozen=True)
class Fact:
    """One line of the report; ``ok`` is False if something has to be fixed."""

    name: str
    text: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'BAD'} {self.name:<14} {self.text}"


def _show_versions(asked: bool) -> None:
    if asked:
        typer.echo(f"sp_compiler {version('sp-compiler')}, torch {torch.__version__}")
        raise typer.Exit


def version_option(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_versions, is_eager=True,
            help="Versions of sp_compiler and torch; doctor shows more.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Take the options of ``sp-compiler`` itself, which come before a command."""


def examine() -> list[Fact]:
    """Check everything; this compiles a small model."""
    return [*_versions(), *_devices(), *_group(), _small_model()]


def _versions() -> Iterator[Fact]:
    yield Fact("python", platform.python_version())
    # From the package's own metadata, so that the versions are written only once.
    for text in requires("sp-compiler") or ():
        requirement = Requirement(text)
        if requirement.marker is not None:  # of an extra
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            yield Fact(requirement.name, f"missing, {requirement.specifier} is needed", ok=False)
            continue
        admitted = requirement.specifier.contains(installed, prereleases=True)
        note = "" if admitted else f", {requirement.specifier} is needed"
        yield Fact(requirement.name, f"{installed}{note}", admitted)
    for name in ("transformers", "peft", "matplotlib"):  # for bug reports
        with contextlib.suppress(PackageNotFoundError):
            yield Fact(name, version(name))


def _devices() -> Iterator[Fact]:
    if not torch.cuda.is_available():
        yield Fact("device", "CPU only: plans, proofs and tests work, training is slow")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        # Between devices without direct access NCCL goes through the host's memory.
        peers = sum(
            torch.cuda.can_device_access_peer(index, other)
            for other in range(count)
            if other != index
        )
        text = f"{device.name}, {bytes_text(device.total_memory)}"
        yield Fact(f"cuda:{index}", f"{text}, reaches {peers} of {count - 1} others directly")


def _group() -> Iterator[Fact]:
    distributed = torch.distributed
    if not distributed.is_available():
        yield Fact("group", "torch was built without torch.distributed", ok=False)
        return
    names = [
        name for name in ("nccl", "gloo", "mpi") if getattr(distributed, f"is_{name}_available")()
    ]
    # NCCL for GPUs, gloo for CPUs; without any of them ranks cannot communicate.
    yield Fact("backends", ", ".join(names) or "none", bool(names))
    # Only read, not started: a group that hangs would also hang this report.
    if "RANK" in os.environ:
        rank, size = os.environ["RANK"], os.environ.get("WORLD_SIZE", "?")
        yield Fact("group", f"rank {rank} of {size}, started by torchrun or a similar launcher")
    else:
        yield Fact("group", "none here: torchrun --nproc-per-node N starts one")


class _Small(nn.Module):
    """Two linear layers and a nonlinearity, the smallest model that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def _small_model() -> Fact:
    start = time.perf_counter()
    try:
        # Compiling alone would not reveal kernels or a torch build with wrong results.
        report = verify(_Small(), ((torch.randn(4, 8),), {}), tp=2)
    except Exception as error:  # any error is what this command looks for
        return Fact("a small model", f"{type(error).__name__}: {error}", ok=False)
    seconds = time.perf_counter() - start
    text = f"compiled and verified on 2 simulated ranks in {seconds:.1f} s"
    return Fact("a small model", text if report.ok else str(report), report.ok)
