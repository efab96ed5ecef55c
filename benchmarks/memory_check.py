"""Planned memory compared with the memory that a rank really holds, for every model of the tests.

    python -m benchmarks.memory_check [--models gpt2 llama ...] [--tp 1 2 8] [--write]

One process runs the last rank's step, whose parts have the padding, on real tensors over a fake
process group, whose collectives move nothing and make tensors of the right size. The comparison
covers the bytes alive between forward and backward, which must agree to the byte, and the peak over
the step. Budgets of ``recompute="auto"`` are the minimum that fits, the largest that is useful, and
the middle.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import PeakRecorder
from benchmarks.performance import RESULTS, save
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.base.units import bytes_text
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.parameters import tensor_spec
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu.host_memory import HostTrip
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.mesh_axes import TENSOR_AXIS
from sp_compiler.runtime.padding import make_room, stored_part
from sp_compiler.verification.judge import backward
from tests.helpers import parity
from tests.models import architectures, zoo

OTHERS = ("mixtral", "gemma2", "phi3", "falcon")
POLICIES = ("none", "attention", "selective", "full")
DROPOUT = 0.1


@dataclass(frozen=True)
class Row:
    """Bytes of one rank."""

    model: str
    tp: int
    policy: str
    kept_planned: int
    kept_measured: int
    peak_planned: int
    peak_measured: int


def case(name: str) -> parity.Case:
    """A model of the zoo with dropout, or one of the architectures."""
    if name in zoo.names():
        return parity.case(name, 2, 16, DROPOUT)
    return architectures.case(
        name, architectures.size("dividing", architectures.turn(name, "dividing"))
    )


def measure(found: parity.Case, program: CompiledProgram, rank: int = 0) -> tuple[int, int]:
    """Bytes that a rank keeps after the forward, and its peak in a step."""
    world_size, placed = program.world_size, program.param_placements
    group = dist.group.WORLD if world_size > 1 else None
    params = {
        name: _parameter(value, placed[name], rank, world_size)
        for name, value in found.params.items()
        if name in placed
    }
    inputs = [value for value in found.inputs if isinstance(value, Tensor)]
    constants = program.program.constants
    outside = [*params.values(), *found.buffers.values(), *constants.values(), *inputs]
    with PeakRecorder() as recorder, _only_device(recorder):
        run = Executor(program, Communicator(group, rank, world_size)).run(
            params, found.buffers, found.inputs, parity.SEED
        )
        outputs = list(run.outputs)
        returned = [value for value in outputs if isinstance(value, Tensor)]
        kept = recorder.alive_bytes(excluding=[*outside, *returned])
        del run, returned
        backward(outputs, program.program.out_spec)
    grads = [value.grad for value in params.values() if value.grad is not None]
    return kept, recorder.peak_bytes(excluding=[*outside, *grads])


def _parameter(value: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """The part of one rank, on several ranks a DTensor: the runtime sums its gradients in place."""
    part = stored_part(value.detach(), placement, rank, world_size).clone()
    if world_size == 1:
        return part.requires_grad_(value.requires_grad)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(TENSOR_AXIS,))
    spec = tensor_spec(mesh, value.shape, value.dtype, placement)
    parameter = DTensor(part, spec, requires_grad=value.requires_grad)
    make_room(parameter, placement, world_size)
    return parameter


@contextmanager
def _only_device(recorder: PeakRecorder) -> Iterator[None]:
    """Leave out copies in the memory of the host, which on a CPU is the device's."""
    leave = HostTrip.leave

    def watched(trip: HostTrip, saved: Sequence[Any]) -> list[Any]:
        kept = leave(trip, saved)
        recorder.leave_out(kept[position] for position in trip.positions)
        return kept

    with mock.patch.object(HostTrip, "leave", watched):
        yield


def rows(name: str, tp: int) -> Iterator[Row]:
    """Every policy and three budgets."""
    found = case(name)
    for policy, options in [
        *((each, {"recompute": each}) for each in POLICIES),
        *_budgets(found, tp),
    ]:
        program = parity.compiled_in_turn(found, tp=tp, **options)
        memory = step_memory(program)
        kept, peak = measure(found, program, rank=tp - 1)
        yield Row(name, tp, policy, memory.kept_bytes, kept, memory.peak_bytes, peak)


def _budgets(found: parity.Case, tp: int) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        parity.compiled_in_turn(found, tp=tp, recompute="auto", memory_budget=1)
        raise AssertionError("a budget of one byte was met")
    except ArgumentError as error:
        least = int(str(error).partition("the minimum that fits is ")[2].split()[0])
    top = parity.compiled_in_turn(found, tp=tp, recompute="auto", memory_budget=1 << 50)
    most = step_memory(top).peak_bytes
    for label, budget in (("least", least), ("middle", (least + most) // 2), ("most", most)):
        yield f"auto, {label}", {"recompute": "auto", "memory_budget": budget}


def main() -> None:
    """Print what differs; keep everything if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*zoo.names(), *OTHERS])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console = Console()
    found: list[Row] = []
    for tp in options.tp:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
        for name in track(options.models, f"tp={tp}", console=console):
            found += rows(name, tp)
        dist.destroy_process_group()
    table = Table("model", "tp", "policy", "kept planned", "measured", "peak planned", "measured")
    wrong = [row for row in found if row.kept_planned != row.kept_measured]
    wrong += [row for row in found if row not in wrong and row.peak_planned != row.peak_measured]
    for row in wrong:
        sizes = row.kept_planned, row.kept_measured, row.peak_planned, row.peak_measured
        table.add_row(row.model, str(row.tp), row.policy, *map(bytes_text, sizes))
    kept = sum(row.kept_planned == row.kept_measured for row in found)
    worst = max(abs(row.peak_planned / row.peak_measured - 1) for row in found)
    console.print(f"{kept} of {len(found)} keep what was planned, to the byte;")
    console.print(f"the planned peak is off by {100 * worst:.2f} % at most")
    if wrong:
        console.print(table)
    if options.write:
        save(RESULTS / "memory_check.json", "memory", map(asdict, found))


if __name__ == "__main__":
    main()
