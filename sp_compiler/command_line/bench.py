"""Time and memory of a step on this machine, eager and compiled."""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.api import compile as compile_model
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.options import Options
from sp_compiler.planning.table_text import table
from sp_compiler.runtime.recorder import Recorder
from sp_compiler.trace.arguments import ExampleInputs

_WARM_UP = 2  # the first step compiles, the second reuses the memory that the first allocated
_SEED = 0


@dataclass(frozen=True)
class Measured:
    """A step of one contender on this rank.

    Attributes:
        step_us: median time of forward and backward.
        kept_bytes: bytes that forward saves for backward: storages other than parameters, buffers,
            inputs and outputs.
        peak_bytes: peak of a step without parameters and gradients; ``None`` on CPUs, whose
            allocator has no counters.
    """

    step_us: float
    kept_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Bench:
    """Result of :func:`bench`.

    Attributes:
        time_ratio: compiled over eager time, the median over pairs of alternating steps, which
            varies less than either time.
    """

    model_name: str
    device: str
    tp: int
    steps: int
    eager: Measured
    compiled: Measured
    time_ratio: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("", "step", "kept for backward", "peak"),
            ("eager torch, one rank alone", *_texts(self.eager)),
            (f"sp_compiler, tp={self.tp}", *_texts(self.compiled)),
            (
                "ratio, of steps in pairs",
                f"{self.time_ratio:.2f}",
                _ratio(self, "kept_bytes"),
                _ratio(self, "peak_bytes"),
            ),
        ]
        width = 3 if self.eager.peak_bytes is None else 4
        return (
            f"{self.model_name} on {self.device}: forward and backward, per rank, median of "
            f"{self.steps} steps\n{table(row[:width] for row in rows)}"
        )


def _texts(measured: Measured) -> tuple[str, ...]:
    return (
        time_text(measured.step_us),
        bytes_text(measured.kept_bytes),
        bytes_text(measured.peak_bytes or 0),
    )


def _ratio(result: Bench, name: str) -> str:
    compiled, eager = getattr(result.compiled, name), getattr(result.eager, name)
    return f"{compiled / eager:.2f}" if eager else "-"


@contextlib.contextmanager
def joined_ranks(tp: int | None) -> Iterator[tuple[int, str]]:
    """Join the other ranks that ``torchrun`` started; yield their number and this rank's device.

    Raises:
        ArgumentError: the number of ranks is not ``tp``.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if tp not in (None, num_ranks):
        raise ArgumentError(
            f"--tp {tp} needs {tp} processes, but the number of processes is {num_ranks}: start "
            f"them with torchrun --standalone --nproc-per-node {tp} -m sp_compiler bench"
        )
    device = "cpu"
    if torch.cuda.is_available():
        # Before the group is created: NCCL would use the first device on every rank.
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    # All ranks must have the same model and inputs.
    torch.manual_seed(_SEED)
    if num_ranks > 1:
        dist.init_process_group()
    try:
        yield num_ranks, device
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()


def bench(
    model: nn.Module, example_inputs: ExampleInputs, tp: int, steps: int, options: Options
) -> Bench:
    """Measure alternating steps of ``model``, compiled, and of an eager copy."""
    # The two alternate, because the machine's speed may change over a minute.
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    args, kwargs = example_inputs
    # A copy, because compiling takes over the model's parameters.
    contenders = {"eager": copy.deepcopy(model), "compiled": compile_model(model, tp=tp, **options)}
    runs = {name: _Run(each, args, kwargs, device) for name, each in contenders.items()}
    for _ in range(_WARM_UP):
        for run in runs.values():
            run.step_us()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            times[name].append(run.step_us())
    # Separate from the timed steps, as recording every operator is slower than a small operator.
    measured = {
        name: Measured(statistics.median(times[name]), run.kept_bytes(), run.peak_bytes())
        for name, run in runs.items()
    }
    pairs = zip(times["compiled"], times["eager"], strict=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = "" if device.type == "cuda" else f", threads of a rank: {torch.get_num_threads()}"
    return Bench(
        type(contenders["eager"]).__name__,
        f"{tp} x {name}{threads}",
        tp,
        steps,
        **measured,
        time_ratio=statistics.median(compiled / eager for compiled, eager in pairs),
    )


@dataclass(frozen=True)
class _Run:
    """Steps of one contender."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device

    def step_us(self) -> float:
        self._wait()
        start = time.perf_counter()
        _loss(self._forward()).backward()
        self._wait()
        return (time.perf_counter() - start) * 1e6

    def kept_bytes(self) -> int:
        with Recorder() as recorder:
            result = self._forward()
        seen = pytree.tree_leaves((self.args, self.kwargs, result))
        tensors = [leaf for leaf in seen if isinstance(leaf, Tensor)]
        outside = [*self.model.parameters(), *self.model.buffers(), *tensors]
        kept = recorder.alive_bytes(excluding=outside)
        _loss(result).backward()  # a rank that leaves a step unfinished would make others wait
        return kept

    def peak_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        # Gradients exist since the first step and are accumulated into.
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step_us()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _forward(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def _wait(self) -> None:
        """Wait until the device and the other ranks have finished their work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if dist.is_initialized():
            dist.barrier()


def _loss(result: Any) -> Tensor:
    """Return the model's own loss if it has one, else the mean of its outputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    reached = [leaf for leaf in leaves if leaf.requires_grad]
    if not reached:
        raise ArgumentError(
            "none of the model's outputs requires a gradient: there is no backward to "
            "measure; is the model frozen?"
        )
    # In float32, so that the mean over many logits stays accurate.
    losses = [leaf for leaf in reached if leaf.dim() == 0]
    return losses[0] if losses else torch.stack([leaf.float().mean() for leaf in reached]).sum()
