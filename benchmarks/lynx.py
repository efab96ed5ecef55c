"""Overlapped recomputation against recomputation on demand, at equal memory, in Lynx's range.

    python -m benchmarks.lynx [--models 1.3B ...] [--write]

Plain GPTs of 1.3B to 22B parameters, 8 tensor-parallel ranks linked by NVLink ("a100") or by PCIe
("a100-pcie"). On demand: "full" and "attention" (selective recomputation of arXiv 2205.05198), with
every collective waited for at once. Each is compared with ``recompute="auto"`` and
``overlap=True``, with that contender's peak of activations as its budget, without half batches and
with ``half_batches="auto"``. Times are those of plans with fused kernels.
Lynx is arXiv 2406.08756; batch and sizes are those of other papers, not of its own tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget_curve import LossOnly
from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.performance import RESULTS, markdown_table
from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.ir.program import Program
from sp_compiler.options import CompileOptions
from sp_compiler.passes.half_batches import halves_pay
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.trace.export import capture

TP, BATCH, LENGTH = 8, 4, 2048
# Number of layers: with fewer the loss head would determine the peak.
LAYERS = 8
# (hidden size, heads): the shapes of GPT-3 (arXiv 2005.14165, table 2.1), and the 22B model of
# arXiv 2205.05198 for the largest.
MODELS = {"1.3B": (2048, 16), "6.7B": (4096, 32), "13B": (5120, 40), "22B": (6144, 64)}
LINKS = {"NVLink": "a100", "PCIe": "a100-pcie"}
CONTENDERS = ("full", "attention")
# Lowest and highest values that the two versions of the paper report, with the legend's text.
REPORTED = {"v1: 1.02 to 1.53": (1.02, 1.53), "v4: up to 1.37": (1.0, 1.37)}


@dataclass(frozen=True)
class Row:
    """One contender, and ours within the same memory.

    Attributes:
        on_demand_us: of a step.
        collectives_us: the same with collectives overlapped, recomputation as it is.
        ours_us: with ``recompute="auto"`` and ``overlap=True``.
        peak_bytes: of the contender's activations.
        our_peak_bytes: at most as much.
        halves_us: with ``half_batches="auto"`` besides.
        halves_peak_bytes: likewise.
    """

    model: str
    link: str
    contender: str
    on_demand_us: float
    collectives_us: float
    ours_us: float
    peak_bytes: int
    our_peak_bytes: int
    halves_us: float
    halves_peak_bytes: int

    @property
    def speed_up(self) -> float:
        """Return the speed-up of ours."""
        return self.on_demand_us / self.ours_us

    @property
    def halves_speed_up(self) -> float:
        """Return the speed-up of ours with half batches where they are faster."""
        return self.on_demand_us / self.halves_us


class _Settings:
    """Plans of one program with collectives waited for at once, or overlapped."""

    def __init__(self, program: Program, **base: Any) -> None:
        self._base: Any = {"tp": TP, "backend": "inductor", **base}
        self._shared = Compilation(program, CompileOptions(**self._base))

    def plan(self, **wanted: Any) -> Plan:
        """Return the plan of a recompute setting."""
        options = CompileOptions(**self._base, **wanted)
        return make_plan(self._shared.finish(options), options)


def rows(model_name: str) -> Iterator[Row]:
    """Plan one model on both links."""
    hidden, heads = MODELS[model_name]
    config = GPTConfig(num_positions=LENGTH, hidden_size=hidden, num_layers=LAYERS, num_heads=heads)
    with torch.device("meta"):
        model = LossOnly(PlainGPT(config)).bfloat16()
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    for link, profile in LINKS.items():
        full, halved = (
            to_program(
                capture(model, (ids,), {}),
                CompileOptions(tp=TP, hardware=profile, half_batches=half_batches),
            )
            for half_batches in (False, True)
        )
        # Settings of one compilation may differ only in recomputation.
        waiting = _Settings(full, hardware=profile, overlap=False)
        overlapped = _Settings(full, hardware=profile)
        in_halves = _Settings(halved, hardware=profile, half_batches=True)
        for contender in CONTENDERS:
            on_demand = waiting.plan(recompute=contender)
            peak_bytes = on_demand.activation_peak_bytes
            ours = overlapped.plan(recompute="auto", memory_budget=peak_bytes)
            halves = in_halves.plan(recompute="auto", memory_budget=peak_bytes)
            best = halves if halves_pay(halves, ours, peak_bytes) else ours
            yield Row(
                model=model_name,
                link=link,
                contender=contender,
                on_demand_us=on_demand.step_us,
                collectives_us=overlapped.plan(recompute=contender).step_us,
                ours_us=ours.step_us,
                peak_bytes=peak_bytes,
                our_peak_bytes=ours.activation_peak_bytes,
                halves_us=best.step_us,
                halves_peak_bytes=best.activation_peak_bytes,
            )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    times = map(time_text, (row.on_demand_us, row.collectives_us, row.ours_us))
    peaks = f"{bytes_text(row.our_peak_bytes)} of {bytes_text(row.peak_bytes)}"
    speed_ups = f"{row.speed_up:.2f}x", f"{row.halves_speed_up:.2f}x"
    halves = time_text(row.halves_us), bytes_text(row.halves_peak_bytes)
    return row.model, row.link, row.contender, *times, peaks, *halves, *speed_ups


HEAD = (
    *("model", "link", "on demand", "step", "collectives overlapped", "auto, overlapped"),
    *("peak of activations", "with half batches", "peak", "speed-up", "with half batches"),
)


def draw(found: Sequence[Row], path: Path) -> bool:
    """Write the figure; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.model for row in found))
    for (printed, (low, high)), shade in zip(REPORTED.items(), ("0.9", "0.8"), strict=True):
        axes.axhspan(low, high, color=shade, label=f"Lynx {printed}", zorder=0)
    series = [(link, contender) for link in LINKS for contender in CONTENDERS]
    for number, (link, contender) in enumerate(series):
        own = {row.model: row for row in found if (row.link, row.contender) == (link, contender)}
        x = [place + (number - 1.5) * 0.19 for place in range(len(names))]
        heights = [own[name].speed_up for name in names]
        bars = axes.bar(x, heights, width=0.17, label=f"{link}, over {contender}")
        more = [own[name].halves_speed_up - own[name].speed_up for name in names]
        color = bars.patches[0].get_facecolor()
        axes.bar(x, more, bottom=heights, width=0.17, color=color, alpha=0.5)
    axes.plot([], [], "s", color="0.5", alpha=0.5, label="lighter: half batches")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="speed-up over recomputation on demand", xlabel="parameters")
    highest = max(row.halves_speed_up for row in found)
    axes.set_ylim(0.9, highest + 0.3)  # room for the legend
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)
    return True


def main() -> None:
    """Print the table in Markdown; keep it and draw it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    found: list[Row] = []
    for name in options.models:
        for row in rows(name):
            print(*cells(row), sep=" | ", flush=True)
            found.append(row)
    print(markdown_table(HEAD, map(cells, found)))
    if not options.write:
        return
    kept = json.dumps([asdict(row) for row in found], indent=2)
    (RESULTS / "lynx.json").write_text(kept + "\n")
    if not draw(found, RESULTS / "lynx.png"):
        print("no figure: matplotlib is not installed (pip install matplotlib)")


if __name__ == "__main__":
    main()
