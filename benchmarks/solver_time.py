"""Time to place models: a distinct block on its own, and whole plans of the largest ones.

    python -m benchmarks.solver_time [--models llama t5] [--tp 8] [--large gpt3-175b llama-405b]

One process, no process group, large models on the ``meta`` device. CPU seconds are shown next to
wall-clock seconds, in case the machine is busy with other work.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.models import PRESETS, PlainGPT
from sp_compiler.api import plan
from sp_compiler.compiler import to_program
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.outputs import route_outputs
from sp_compiler.passes.sharding.shard import placement_problem
from sp_compiler.solve.placement import solve
from sp_compiler.trace.export import capture
from tests.models import zoo

Result = TypeVar("Result")


@dataclass(frozen=True)
class Seconds:
    """Of one call."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} ({self.cpu:.2f})"

    def __truediv__(self, count: int) -> Seconds:
        return Seconds(self.wall / count, self.cpu / count)


def timed(function: Callable[[], Result]) -> tuple[Result, Seconds]:
    """The result of a call and what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def block_row(name: str, tp: int) -> tuple[str, ...]:
    """Sizes of the placement problem of a zoo model, and the time to build and to solve it."""
    options = CompileOptions(tp=tp)
    program = to_program(capture(zoo.build(name), (), zoo.inputs(name)), options)
    builder, build = timed(lambda: placement_problem(route_outputs(program), options, {}, ()))
    vertices = builder.problem.vertices
    _, solved = timed(lambda: solve(vertices, builder.prices.conversion_us))
    count = len(program.regions)
    num_options = sum(len(vertex.options) for vertex in vertices)
    sizes = (str(count), str(len(vertices)), str(num_options))
    return name, *sizes, str(build), str(solved), str(solved / count)


def gpt3_175b() -> tuple[nn.Module, Tensor]:
    """96 layers, as in the activation-recomputation paper, and one sequence."""
    with torch.device("meta"):
        return PlainGPT(PRESETS["gpt3-175b"]).bfloat16(), torch.zeros(1, 2048, dtype=torch.long)


def llama_405b() -> tuple[nn.Module, Tensor]:
    """126 layers (arXiv 2407.21783, table 3) and one sequence."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
        return model, torch.zeros(1, 2048, dtype=torch.long)


LARGE = {"gpt3-175b": gpt3_175b, "llama-405b": llama_405b}


def plan_row(name: str, tp: int) -> tuple[str, ...]:
    """From the call of ``plan`` to its result, and the process' peak so far in GiB."""
    model, ids = LARGE[name]()
    found, seconds = timed(lambda: plan(model, ((), {"input_ids": ids, "labels": ids}), tp=tp))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    steps = sorted(found.seconds.items(), key=lambda item: -item[1])[:3]
    slowest = ", ".join(f"{step} {spent:.2f}" for step, spent in steps)
    return name, str(seconds), f"{peak:.2f}", slowest


def main() -> None:
    """Print both tables; the large models first, so that the memory peak is their own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=zoo.names(), default=zoo.names())
    parser.add_argument("--large", nargs="*", choices=list(LARGE), default=list(LARGE))
    parser.add_argument("--tp", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=140)
    large = Table("seconds, clock (CPU)", "plan", "peak GiB", "slowest steps")
    for name in options.large:
        large.add_row(*plan_row(name, options.tp))
    console.print(large)
    sizes = ("blocks", "vertices", "options")
    table = Table("seconds, clock (CPU)", *sizes, "build", "solve", "solve / block")
    for name in options.models:
        table.add_row(*block_row(name, options.tp))
    console.print(table)


if __name__ == "__main__":
    main()
