"""Step time of sp_compiler compared with eager code and with hand-written and library peers.

A step is forward + backward, float32, one thread per rank. Contenders alternate in every round, and
a ratio is the median over rounds of the ratio of the two times in one round. Four runs::

    tensor parallel   hidden 512, 4 layers, 2 gloo ranks, each recomputation
    one device        tp=1 against eager, dropout on and off
    overhead          hidden 64, collectives free (a fake process group), CPU time
    rank checks       2 gloo ranks, with and without what they compare in every call, CPU time

    python -m benchmarks.step_time [--rounds 20] [--only tensor-parallel] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import contenders
from benchmarks.contenders import PRODUCT, PRODUCT_TP
from benchmarks.measure import alternate, ratio
from benchmarks.models import GPTConfig
from benchmarks.peers import megatron_core
from benchmarks.performance import keep
from sp_compiler.runtime.rank_checks import RankAgreement

RANKS = 2
BATCH, LENGTH = 2, 512
RECOMPUTES = ("none", "attention", "selective", "full")
RUNS = ("tensor-parallel", "one-device", "overhead", "rank-checks")


@dataclass(frozen=True)
class Row:
    """One contender of a run.

    Args:
        ratio: the time of sp_compiler, with the layout of this contender, divided by this
            contender's: below 1 sp_compiler is faster.
    """

    setting: str
    contender: str
    median_ms: float
    ratio: float


def config(hidden_size: int, dropout: float) -> GPTConfig:
    """The plain GPT of 4 layers and 8 heads."""
    return GPTConfig(
        vocab_size=16 * hidden_size,
        num_positions=LENGTH,
        hidden_size=hidden_size,
        num_layers=4,
        num_heads=8,
        dropout=dropout,
        attention_dropout=dropout,
    )


def tensor_parallel(rounds: int) -> list[Row]:
    """On this rank of the default group."""
    rows = []
    size = config(512, 0.0)
    ids = contenders.random_ids(size, BATCH, LENGTH)
    for recompute in RECOMPUTES:
        steps = contenders.tensor_parallel(size, ids, recompute, RANKS)
        times = alternate(steps, rounds=rounds, before=dist.barrier)
        rows += _rows(f"recompute={recompute}", times)
    return rows


def one_device(rounds: int) -> list[Row]:
    """tp=1 against eager."""
    rows = []
    for dropout in (0.0, 0.1):
        size = config(512, dropout)
        ids = contenders.random_ids(size, BATCH, LENGTH)
        steps = {
            PRODUCT: contenders.compiled(size, ids, "none", 1),
            "eager": contenders.eager(size, ids, "none"),
        }
        rows += _rows(f"dropout={dropout}", alternate(steps, rounds=rounds))
    return rows


def overhead(rounds: int) -> list[Row]:
    """Every contender with almost no computation and collectives that take no time."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    size = config(64, 0.0)
    ids = contenders.random_ids(size, BATCH, 64)
    steps = contenders.tensor_parallel(size, ids, "none", RANKS)
    steps["eager, unsharded"] = contenders.eager(size, ids, "none")
    # One thread computes and nothing waits, so its CPU time is independent of other load.
    times = alternate(steps, rounds=10 * rounds, warmup=10, clock=time.process_time)
    rows = _rows("hidden=64", times)
    dist.destroy_process_group()
    return rows


def rank_checks(rounds: int) -> list[Row]:
    """On this rank of the default group: a short step and a long one."""
    checks = RankAgreement.begin_call
    rows = []
    for hidden_size, length in ((64, 64), (256, 256)):
        size = config(hidden_size, 0.0)
        step = contenders.compiled(size, contenders.random_ids(size, BATCH, length), "none", RANKS)

        def unchecked(step: Any = step) -> None:
            # By hand, because mock.patch takes longer than the measured code.
            RankAgreement.begin_call = lambda *_, **__: None  # type: ignore[method-assign]
            step()
            RankAgreement.begin_call = checks  # type: ignore[method-assign]

        times = alternate(
            {PRODUCT: step, "without rank checks": unchecked},
            rounds=20 * rounds,
            warmup=4,
            before=dist.barrier,
            # The checks add less than the noise of the rest: gloo's threads, waits for a rank.
            clock=time.thread_time,
        )
        rows += _rows(f"hidden={hidden_size}", times)
    return rows


def _rows(setting: str, times: dict[str, list[float]]) -> list[Row]:
    return [
        Row(setting, name, statistics.median(values), ratio(times, _product(name), name))
        for name, values in times.items()
    ]


def _product(contender: str) -> str:
    return PRODUCT_TP if contender.endswith(" TP") else PRODUCT


def _rank(rank: int, folder: str, measure: Callable[[int], list[Row]], rounds: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    rows = measure(rounds)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def _on_ranks(measure: Callable[[int], list[Row]], rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, measure, rounds), nprocs=RANKS)
        return [Row(**row) for row in json.loads(Path(folder, "rows.json").read_text())]


def table(run: str, rows: list[Row]) -> Table:
    """Rows of a run for a terminal."""
    table = Table("setting", "contender", "median ms", f"{PRODUCT} / contender", title=run)
    for row in rows:
        numbers = f"{row.median_ms:.1f}", f"{row.ratio:.2f}"
        table.add_row(row.setting, row.contender, *numbers)
    return table


def main() -> None:
    """Run what was asked for; print each as a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=RUNS, action="append")
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if not megatron_core.is_installed():
        console.print(megatron_core.HOW_TO_INSTALL, markup=False)
    on_ranks = partial(_on_ranks, tensor_parallel), partial(_on_ranks, rank_checks)
    functions: dict[str, Any] = dict(
        zip(RUNS, (on_ranks[0], one_device, overhead, on_ranks[1]), strict=True)
    )
    for name in options.only or RUNS:
        with console.status(f"{name}, {options.rounds} rounds"):
            rows = functions[name](options.rounds)
        console.print(table(name, rows))
        if options.write:
            keep("step_time", name, map(asdict, rows), rounds=options.rounds)


if __name__ == "__main__":
    main()
