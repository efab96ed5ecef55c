"""Compile time against depth: identical layers are compiled once, so it must hardly grow.

    python -m benchmarks.compile_time [--layers 4 48] [--hidden 512]

One process under a fake process group of 8 ranks.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

import sp_compiler
from benchmarks.contenders import random_ids
from benchmarks.measure import Stopwatch
from benchmarks.models import GPTConfig, PlainGPT

TENSOR_PARALLEL = 8


def compile_seconds(num_layers: int, hidden_size: int) -> float:
    """Seconds of ``sp_compiler.compile`` for a plain GPT of ``num_layers`` blocks."""
    config = GPTConfig(
        vocab_size=4096,
        num_positions=256,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=TENSOR_PARALLEL,
    )
    model = PlainGPT(config)
    ids = random_ids(config, 2, 256)
    with Stopwatch() as watch:
        sp_compiler.compile(model, tp=TENSOR_PARALLEL, example_inputs=((ids,), {"labels": ids}))
    return watch.ms / 1e3


def main() -> None:
    """Print seconds by depth, the median of three after one warm-up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 48])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TENSOR_PARALLEL)
    compile_seconds(2, 64)  # what the first compilation alone pays: imports, caches
    table = Table("layers", "seconds", "in units of the first")
    first = None
    for num_layers in options.layers:
        times = [compile_seconds(num_layers, options.hidden) for _ in range(options.repeats)]
        seconds = statistics.median(times)
        first = first or seconds
        table.add_row(str(num_layers), f"{seconds:.2f}", f"{seconds / first:.2f}")
    Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
