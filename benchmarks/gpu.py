"""Measurements on an accelerator: memory and plans, results and the CPU's, times and peers'.

    python -m benchmarks.gpu [--device cuda] [--only memory slices] [--small] [--write]

memory    bytes kept and the peak of a step of ten models as planned, as the operators made them,
          and as the allocator counted them, one rank
numbers   loss and gradients of the same models on the device against the CPU, dropout included
slices    one of 8 ranks' part of layers of the paper's 22B and 175B and of Llama-3-70B; the other
          ranks are a fake process group, which copies instead of sending. sp_compiler, eager, with
          Inductor and, on an accelerator, with CUDA graphs, is compared with hand-written
          Megatron-style layers, with decomposed or with PyTorch's attention, and with the unsharded
          layer in eager mode
attention the operator for attention compared with its decomposition and with PyTorch's kernels
regions   forward and backward of each region of a GPT and a Llama, as planned with a profile of the
          device and as measured
trace     kernels of a step of a 22B layer with dropout and "selective"; ``--write`` also keeps
          the profiler's trace, for a browser (``chrome://tracing``)

``--device cpu --small`` runs all of it without an accelerator, to test the code, not to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sp_compiler
from benchmarks.gpu_attention import AttentionRow, attention
from benchmarks.gpu_regions import regions
from benchmarks.gpu_slices import DROPOUT, KernelRow, SliceRow, slices, trace
from benchmarks.measure import PeakRecorder, loss_of
from benchmarks.performance import RESULTS, markdown_table, save
from benchmarks.region_times import Row as RegionRow
from sp_compiler.ops.gpu import attention as kernels
from tests.models import architectures
from tests.models.architecture import Size

MODELS = (
    "gpt2", "llama", "mixtral", "gemma2", "phi3", "falcon", "bert", "t5", "whisper", "nanogpt",
)  # fmt: skip
FILE = RESULTS / "gpu.json"
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
PARTS = ("memory", "numbers", "attention", "slices", "regions", "trace")
# The largest sequence for which all of the models have positions.
LARGE = Size(16, 8, 1024, 4096, 32000, 16, 64, 8, DROPOUT)
SMALL = replace(architectures.size("dividing", 1), dropout=DROPOUT)
_HEAD = """# On a GPU

Written by `python -m benchmarks.gpu --write` from real runs; not edited by hand. `pytest -m slow
tests/test_cuda.py` has more comparisons, among them bitwise ones of masks and replayed steps.
"""
_ABOUT = {
    "memory": "MiB of a step on one rank, float32: as planned, as allocated by the operators, "
    "and as requested from CUDA's allocator. *kept* is between forward and backward; a peak "
    "is without parameters, and without their gradients unless it says so.",
    "numbers": "Difference of loss and gradients between the GPU and the CPU, float32, dropout "
    "0.1, relative to the loss and to the largest gradient.",
    "slices": "One of 8 ranks' part of layers of a large model, bfloat16, milliseconds. With few "
    "layers, what a step does once (embeddings, loss, their launches) is a large part of it. "
    "Collectives are replaced by copies on the GPU, 0.5 ms of the step whose trace is below. "
    "*ratio* is relative to the first contender of a setting, *over none* to the "
    "same contender without recomputation. The hand-written layers and the unsharded GPT are "
    "launched operator by operator and, unless a row says otherwise, use decomposed attention, "
    "which `sp_compiler` computes as [one operator](#attention). The hand-written layers use "
    "PyTorch's own dropout and recompute the attention core for `selective`. For gpt3-175b only "
    "the listed rows were measured.",
    "attention": "Causal attention of 4 x 8 heads and 2048 queries, bfloat16, milliseconds of its "
    "kernels: as one operator, the same with the block size that PyTorch would choose, as "
    "decomposed operators, and PyTorch's FlashAttention, whose dropout masks depend on the number "
    "of ranks. FlashAttention is told that attention is causal; the operator is given a "
    "mask, in which it finds the blocks to skip.",
    "regions": "One rank, hidden 4096, 4 x 2048 tokens, bfloat16, dropout 0.1 (GPT), `selective`: "
    "milliseconds of each region's functions as planned with `sp_compiler.profile()` of this "
    "device and as measured, the shortest of all steps; *estimate* is planned over measured. In "
    "the profile for these rows random numbers are too slow, 121e9 a second, because the launch "
    "of their kernel was included in their time, which is no longer so.",
    "trace": "The kernels of a step of a 22B layer with dropout 0.1 and `selective`, in eager "
    "generated code.",
}


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one step, without parameters, inputs and outputs.

    Args:
        peak_recorded: of what operators made, without the gradients of parameters.
        peak_with_gradients: the same with them.
        peak_allocated: requested from the allocator, the kernels' workspaces included;
            ``None`` on a CPU.
    """

    model: str
    kept_planned: int
    kept_recorded: int
    peak_planned: int
    peak_recorded: int
    peak_with_gradients: int
    peak_allocated: int | None


@dataclass(frozen=True)
class NumbersRow:
    """Differences from the CPU, relative to the loss and to the largest gradient."""

    model: str
    loss_error: float
    gradient_error: float


# Results are stored with their keys in alphabetical order.
_KINDS = {
    "memory": MemoryRow,
    "numbers": NumbersRow,
    "attention": AttentionRow,
    "slices": SliceRow,
    "regions": RegionRow,
    "trace": KernelRow,
}

Row = MemoryRow | NumbersRow | AttentionRow | SliceRow | RegionRow | KernelRow


def memory(device: str, size: Size) -> Iterator[MemoryRow]:
    """Each of the models on one rank."""
    for name in MODELS:
        model, inputs = _model(name, size, device)
        module = sp_compiler.compile(model, tp=1, example_inputs=((), inputs))
        yield _memory(name, module, inputs)


def _memory(name: str, module: Any, inputs: Mapping[str, Tensor]) -> MemoryRow:
    # Once before: permanent allocations of kernels and libraries are not part of a step.
    loss_of(module(**inputs)).backward()
    module.zero_grad(set_to_none=True)
    gc.collect()
    on_cuda = next(module.parameters()).is_cuda
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _requested("current") if on_cuda else 0
    with PeakRecorder() as recorder, kernels_shown():
        output = module(**inputs)
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        # Every forward makes views of constants, but allocates no memory for them.
        constants = module._sp_state.latest.program.constants.values()
        outside = [*module.parameters(), *module.buffers(), *inputs.values(), *constants]
        kept = recorder.alive_bytes(excluding=[*outside, *outputs])
        loss_of(output).backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    plan = module.plan
    return MemoryRow(
        name,
        plan.activation_bytes,
        kept,
        plan.activation_peak_bytes,
        recorder.peak_bytes(excluding=[*outside, *grads]),
        recorder.peak_bytes(excluding=outside),
        # Requested bytes: allocated blocks are up to 511 bytes larger.
        _requested("peak") - before if on_cuda else None,
    )


@contextlib.contextmanager
def kernels_shown() -> Iterator[None]:
    """Context in which a recorder of operators sees the results of attention's compiled kernels."""
    run = kernels._run

    def shown(*args: Any) -> Sequence[Tensor] | None:
        made = run(*args)
        return None if made is None else [x.detach() for x in made]

    with mock.patch.object(kernels, "_run", shown):
        yield


def _requested(which: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def numbers(device: str, size: Size) -> Iterator[NumbersRow]:
    """Each of the models on the CPU and on the device, with the same masks."""
    for name in MODELS:
        (loss, grads), (true_loss, true_grads) = (
            _numbers(*_model(name, size, where)) for where in (device, "cpu")
        )
        largest = max(float(grad.abs().max()) for grad in true_grads)
        pairs = zip(grads, true_grads, strict=True)
        yield NumbersRow(
            name,
            abs(loss - true_loss) / abs(true_loss),
            max(float((grad - true).abs().max()) for grad, true in pairs) / largest,
        )


def _numbers(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[float, list[Tensor]]:
    module: Any = sp_compiler.compile(model, tp=1, example_inputs=((), inputs))
    # Seeds are drawn from the CPU's generator, and masks are a function of them.
    torch.manual_seed(0)
    loss = loss_of(module(**inputs))
    loss.backward()
    return float(loss), [p.grad.cpu() for p in module.parameters() if p.grad is not None]


def _model(name: str, size: Size, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model = architectures.build(name, size).float().to(device)
    return model, {
        key: (value.float() if value.is_floating_point() else value).to(device)
        for key, value in architectures.inputs(name, size).items()
    }


def page(results: Mapping[str, Any]) -> str:
    """The text of ``docs/gpu.md``."""
    paragraphs = [_HEAD]
    for part, about in _ABOUT.items():
        if part not in results:
            continue
        columns = _KINDS[part].__annotations__
        size = ", sizes of the tests" if results[part]["small"] else ""
        paragraphs += [
            f"## {part.capitalize()}\n\n{about}\n\nOn {results[part]['machine']}{size}.\n",
            markdown_table(
                [name.replace("_", " ") for name in columns],
                [[_cell(part, row[name]) for name in columns] for row in results[part]["rows"]],
            ),
        ]
    return "\n".join(paragraphs)


def _cell(part: str, value: Any) -> str:
    if part == "memory" and isinstance(value, int):
        return f"{value / 2**20:.2f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _keep(part: str, rows: list[dict[str, Any]], *, small: bool) -> None:
    save(FILE, part, rows, small=small)
    PAGE.write_text(page(json.loads(FILE.read_text())))


def main() -> None:
    """Run what was asked for; print each as a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--small", action="store_true", help="sizes of the tests")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="keep the results, a tracked file")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no GPU; --device cpu --small runs")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    size = SMALL if options.small else LARGE
    path = RESULTS / "gpu_trace.json.gz" if options.write else None
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "memory": lambda: memory(options.device, size),
        "numbers": lambda: numbers(options.device, size),
        "attention": lambda: attention(options.device, small=options.small, rounds=options.rounds),
        "slices": lambda: slices(options.device, small=options.small, rounds=options.rounds),
        "regions": lambda: regions(options.device, small=options.small, rounds=options.rounds),
        "trace": lambda: trace(options.device, small=options.small, path=path),
    }
    for part in options.only:
        rows: list[dict[str, Any]] = []
        for row in map(asdict, makers[part]()):
            rows.append(row)
            # Each at once: the time on a machine with a GPU may end before the part does.
            if options.write:
                _keep(part, rows, small=options.small)
        table = Table(*rows[0], title=part)
        for row in rows:
            table.add_row(*(_cell(part, value) for value in row.values()))
        Console().print(table)


if __name__ == "__main__":
    main()
