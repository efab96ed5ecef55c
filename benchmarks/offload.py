"""Activations in the host's memory: bytes on the device, and the cost in time.

    python -m benchmarks.offload [--models 22B ...] [--layers 12] [--write]

Layers of the paper's GPTs with a loss head, batch 1 x 2,048, bfloat16, 8 tensor-parallel ranks of
the profile "h100", kernels fused. ``recompute="selective"`` keeps its activations on the device;
``recompute="auto"`` with ``offload=True`` gets as its budget that run's peak minus the saved bytes
of all layers except two. Times are those of the simulated step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.budget_curve import LossOnly
from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.performance import RESULTS, markdown_table
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.options import CompileOptions
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.trace.export import capture

TP, LENGTH = 8, 2048
# (hidden size, heads): arXiv 2205.05198, table 3.
MODELS = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        layer_bytes: that one layer keeps with "selective".
        selective_us: of a step with it.
        peak_bytes: of its activations.
        budget_bytes: of the others: that peak with two layers' kept bytes alone.
        without_us: of a step within the budget without offloading; ``None`` where nothing fits.
        offload_us: of a step within the budget.
        kept_bytes: of activations that stay on the device until backward, over all layers.
        host_bytes: of activations that do not.
        wait_us: part of ``offload_us`` in which the device waits for copies.
    """

    model: str
    layers: int
    layer_bytes: int
    selective_us: float
    peak_bytes: int
    budget_bytes: int
    without_us: float | None
    offload_us: float
    kept_bytes: int
    host_bytes: int
    wait_us: float


def measure(name: str, layers: int) -> Row:
    """Plan one model on meta tensors."""
    hidden, heads = MODELS[name]
    config = GPTConfig(num_positions=LENGTH, hidden_size=hidden, num_layers=layers, num_heads=heads)
    with torch.device("meta"):
        model = LossOnly(PlainGPT(config)).bfloat16()
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
    base: Any = {"tp": TP, "hardware": "h100"}
    shared = Compilation(to_program(capture(model, (ids,), {}), CompileOptions(**base)),
                         CompileOptions(**base))  # fmt: skip

    def planned(**wanted: Any) -> Plan:
        options = CompileOptions(**base, **wanted)
        # Kernels are fused only in the plan, because compiling them would take longest.
        return make_plan(shared.finish(options), replace(options, backend="inductor"))

    selective = planned(recompute="selective")
    layer_bytes = max(selective.blocks, key=lambda block: block.num_calls).kept_bytes
    budget = selective.activation_peak_bytes - (layers - 2) * layer_bytes
    ours = planned(recompute="auto", memory_budget=budget, offload=True)
    try:
        without_us = planned(recompute="auto", memory_budget=budget).step_us
    except ArgumentError:
        without_us = None
    return Row(
        model=name,
        layers=layers,
        layer_bytes=layer_bytes,
        selective_us=selective.step_us,
        peak_bytes=selective.activation_peak_bytes,
        budget_bytes=budget,
        without_us=without_us,
        offload_us=ours.step_us,
        kept_bytes=ours.activation_bytes,
        host_bytes=ours.host_bytes,
        wait_us=ours.schedule.host_wait_us,
    )


HEAD = (
    *("model", "a layer keeps", "selective", "its peak", "two layers' peak", "auto within that"),
    *("with offload", "more time", "on the host"),
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    return (
        row.model,
        bytes_text(row.layer_bytes),
        time_text(row.selective_us),
        bytes_text(row.peak_bytes),
        bytes_text(row.budget_bytes),
        "too small" if row.without_us is None else time_text(row.without_us),
        time_text(row.offload_us),
        f"{100 * (row.offload_us / row.selective_us - 1):+.1f} %",
        bytes_text(row.host_bytes),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table in Markdown; keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args(arguments)
    found = []
    for name in options.models:
        found.append(measure(name, options.layers))
        print(*cells(found[-1]), sep=" | ", flush=True)
    print(markdown_table(HEAD, map(cells, found)))
    if options.write:
        kept = json.dumps([asdict(row) for row in found], indent=2)
        (RESULTS / "offload.json").write_text(kept + "\n")


if __name__ == "__main__":
    main()
