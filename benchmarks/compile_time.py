"""Compile time against depth: identical layers are compiled once, so only the export may grow.

    python -m benchmarks.compile_time [--layers 4 48] [--hidden 256] [--write]

One process, no process group; compiled for 8 ranks. The export is ``torch.export``'s own time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import random_ids
from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.performance import keep
from sp_compiler.base.pass_report import Pass
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions

TENSOR_PARALLEL = 8


def compile_seconds(num_layers: int, hidden_size: int) -> Mapping[str, float]:
    """Seconds of each step of compiling a plain GPT of ``num_layers`` blocks."""
    config = GPTConfig(
        vocab_size=4096,
        num_positions=256,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=TENSOR_PARALLEL,
    )
    ids = random_ids(config, 2, 256)
    options = CompileOptions(tp=TENSOR_PARALLEL)
    return build(PlainGPT(config), (ids,), {"labels": ids}, options).plan.seconds


def median_seconds(num_layers: int, hidden_size: int, repeats: int) -> dict[str, float]:
    """Medians over ``repeats``, with the sums of what comes after the capture and of all."""
    runs = [compile_seconds(num_layers, hidden_size) for _ in range(repeats)]
    seconds = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
    total = sum(seconds.values())
    return {**seconds, "after the export": total - seconds[Pass.EXPORT], "all": total}


def main() -> None:
    """Print seconds by step and depth, after one warm-up; keep them if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 48])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compile_seconds(2, 64)  # what the first compilation alone pays: imports, caches
    columns = [median_seconds(depth, options.hidden, options.repeats) for depth in options.layers]
    table = Table("seconds", *(f"{depth} layers" for depth in options.layers), "last / first")
    for step in columns[0]:
        values = [column[step] for column in columns]
        table.add_row(step, *(f"{value:.2f}" for value in values), f"{values[-1] / values[0]:.2f}")
    Console().print(table)
    rows = [{"step": step, "seconds": [column[step] for column in columns]} for step in columns[0]]
    if options.write:
        keep("compile_time", "depth", rows, layers=options.layers, hidden=options.hidden)


if __name__ == "__main__":
    main()
