"""Time of each function of a program: as the plan estimates it, and as it is measured here.

    python -m benchmarks.region_times [--rounds 8] [--write]

CPU time, one thread, hidden 512, float32, dropout 0.1, ``tp=1``, with a profile of this machine
from ``sp_compiler.profile``, which is measured in CPU time too.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sp_compiler
from benchmarks import inductor_time
from benchmarks.performance import keep
from sp_compiler import compiler

LAYERS = 2
BACKENDS = "eager", "inductor"


@dataclass(frozen=True)
class Row:
    """One function; ``estimate`` is the planned time in units of the measured one."""

    model: str
    backend: str
    region: str
    direction: str
    planned_ms: float
    measured_ms: float
    estimate: float


class _Timed:
    """The functions of a region; ``times`` gets the CPU milliseconds of each call."""

    def __init__(self, code: Any, times: dict[str, list[float]]) -> None:
        self._code = code
        self._times = times

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._code, name)
        # The backward of a loss is a function of its own.
        direction = {"loss_backward": "backward"}.get(name, name)
        if direction not in ("forward", "backward"):
            return function

        def timed(*arguments: Any) -> Any:
            begin = time.process_time()
            result = function(*arguments)
            self._times.setdefault(direction, []).append((time.process_time() - begin) * 1e3)
            return result

        return timed


def measure(model: nn.Module, backend: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a call, by region and direction, the shortest of all."""
    times: dict[str, dict[str, list[float]]] = {}
    load = compiler.compile_regions

    def load_timed(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        codes = {
            name: _Timed(code, times.setdefault(name, {})) for name, code in loaded.codes.items()
        }
        return replace(loaded, codes=codes)

    with mock.patch.object(compiler, "compile_regions", load_timed):
        step = inductor_time._step(inductor_time._compiled(model, 1, backend))
        for _ in range(rounds + 1):  # the first compiles the kernels
            step()
    return {
        name: {direction: min(found) for direction, found in functions.items()}
        for name, functions in times.items()
    }


def compare(
    name: str,
    build: Callable[[int], nn.Module],
    backend: str,
    rounds: int,
    hardware: sp_compiler.Hardware,
) -> list[Row]:
    """Estimated and measured times of all functions of a model."""
    plan = sp_compiler.plan(
        build(LAYERS),
        ((), inductor_time._inputs()),
        tp=1,
        backend=backend,
        recompute="selective",
        hardware=hardware,
    )
    planned = {
        block.name: {
            "forward": block.forward_us / 1e3,
            "backward": (block.work.step_us - block.forward_us) / 1e3,
        }
        for block in plan.blocks
    }
    return [
        Row(
            name,
            backend,
            region,
            direction,
            planned[region][direction],
            ms,
            planned[region][direction] / ms,
        )
        for region, functions in measure(build(LAYERS), backend, rounds).items()
        for direction, ms in functions.items()
    ]


def main() -> None:
    """Compare all; print a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # What other programs do on a shared machine is in none of the times.
    with mock.patch.object(time, "perf_counter", time.process_time):
        hardware = sp_compiler.profile()
    rows = [
        row
        for name, build in inductor_time.MODELS.items()
        for backend in BACKENDS
        for row in compare(name, build, backend, options.rounds, hardware)
    ]
    table = Table(*asdict(rows[0]))
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else x for x in asdict(row).values()))
    Console().print(hardware, table)
    if options.write:
        keep("region_times", "cpu", [asdict(row) for row in rows], rounds=options.rounds)


if __name__ == "__main__":
    main()
