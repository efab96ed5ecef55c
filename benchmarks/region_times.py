"""Time of each function of a program: as the plan estimates it, and as it is measured here.

    python -m benchmarks.region_times [--rounds 8] [--write]

CPU time, one thread, hidden 512, float32, dropout 0.1, ``tp=1``, with a profile of this machine
from ``sp_compiler.profile``, which is measured in CPU time too.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Clock:
    """What a call is timed with.

    Args:
        now: returns a moment.
        between: returns the milliseconds from one moment to another; called after all steps.
    """

    now: Callable[[], Any]
    between: Callable[[Any, Any], float]


CPU_TIME = Clock(time.process_time, lambda begin, end: (end - begin) * 1e3)
_Moments = dict[str, list[tuple[Any, Any]]]


class _Timed:
    """The functions of a region; ``moments`` gets the begin and the end of each call."""

    def __init__(self, code: Any, moments: _Moments, clock: Clock) -> None:
        self._code = code
        self._moments = moments
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._code, name)
        # The backward of a loss is a function of its own.
        direction = {"loss_backward": "backward"}.get(name, name)
        if direction not in ("forward", "backward"):
            return function

        def timed(*arguments: Any) -> Any:
            begin = self._clock.now()
            result = function(*arguments)
            self._moments.setdefault(direction, []).append((begin, self._clock.now()))
            return result

        return timed


def measure(
    model: nn.Module, inputs: Mapping[str, Tensor], backend: str, rounds: int, clock: Clock
) -> dict[str, dict[str, float]]:
    """Milliseconds of a call, by region and direction, the shortest of all."""
    moments: dict[str, _Moments] = {}
    load = compiler.compile_regions

    def load_timed(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        codes = {
            name: _Timed(code, moments.setdefault(name, {}), clock)
            for name, code in loaded.codes.items()
        }
        return replace(loaded, codes=codes)

    with mock.patch.object(compiler, "compile_regions", load_timed):
        module: Any = sp_compiler.compile(
            model, tp=1, backend=backend, recompute="selective", example_inputs=((), inputs)
        )
        for _ in range(rounds + 1):  # the first compiles the kernels
            module.zero_grad(set_to_none=True)
            module(**inputs)[0].backward()
    return {
        name: {
            direction: min(clock.between(begin, end) for begin, end in found)
            for direction, found in functions.items()
        }
        for name, functions in moments.items()
    }


def compare(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Mapping[str, Tensor],
    rounds: int,
    hardware: sp_compiler.Hardware,
    clock: Clock = CPU_TIME,
) -> Iterator[Row]:
    """Estimated and measured times of all functions of a model, with each of the backends."""
    for backend in BACKENDS:
        plan = sp_compiler.plan(
            build(), ((), inputs), tp=1, backend=backend, recompute="selective", hardware=hardware
        )
        planned = {
            block.name: {
                "forward": block.forward_us / 1e3,
                "backward": (block.work.step_us - block.forward_us) / 1e3,
            }
            for block in plan.blocks
        }
        for region, functions in measure(build(), inputs, backend, rounds, clock).items():
            for direction, ms in functions.items():
                expected = planned[region][direction]
                yield Row(name, backend, region, direction, expected, ms, expected / ms)


def main() -> None:
    """Compare all; print a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # CPU time, which does not include other programs on a shared machine.
    with mock.patch.object(time, "perf_counter", time.process_time):
        hardware = sp_compiler.profile()
    rows = [
        row
        for name, build in inductor_time.MODELS.items()
        for row in compare(
            name, partial(build, LAYERS), inductor_time.random_inputs(), options.rounds, hardware
        )
    ]
    table = Table(*asdict(rows[0]))
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else x for x in asdict(row).values()))
    Console().print(hardware, table)
    if options.write:
        keep("region_times", "cpu", [asdict(row) for row in rows], rounds=options.rounds)


if __name__ == "__main__":
    main()
