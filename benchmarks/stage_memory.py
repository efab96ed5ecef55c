"""Planned memory of pipeline stages compared with the memory that their ranks really hold.

    python -m benchmarks.stage_memory [--models llama gpt2] [--pp 2] [--tp 2] [--write]

Gloo processes train a step of every case with all their tensors recorded. Two values are compared
with ``sp_compiler.plan(mesh=...)`` of each stage: the bytes that the forwards in flight keep, read
when the first backward begins, and the peak over the step. In addition a rank holds messages in
transit, which plans do not count, so layers here are much larger than the values between them.
A schedule that defers weight gradients keeps the most at a later moment, when there are messages:
for such schedules only the peaks are compared.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from benchmarks.measure import PeakRecorder
from benchmarks.performance import RESULTS, save
from sp_compiler.base.units import bytes_text
from sp_compiler.grid_plan.stage_plan import StagePlan
from sp_compiler.pipeline_parallel import runner as runner_module
from sp_compiler.pipeline_parallel.lean_stage import LeanStage
from sp_compiler.pipeline_parallel.schedules import SCHEDULES
from tests.helpers.ranks import run_on_ranks

LAYERS, MICROBATCHES, SAMPLES, SEQUENCE, VOCABULARY = 4, 4, 2, 128, 8192
SETTINGS = (
    ("gpipe", "none"),
    ("1f1b", "selective"),
    ("1f1b", "full"),
    ("interleaved", "attention"),
    ("zero_bubble", "selective"),
    ("dualpipev", "none"),
)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    """Tied embeddings and dropout."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=256, n_layer=LAYERS, n_head=8,
        use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": _llama, "gpt2": _gpt2}


@dataclass(frozen=True)
class Row:
    """Bytes of one rank of a pipeline."""

    model: str
    schedule: str
    recompute: str
    rank: int
    kept_planned: int
    kept_measured: int | None
    peak_planned: int
    peak_measured: int


class _Kept:
    """Reads what a rank keeps when the first backward of a step begins."""

    def __init__(self, recorder: PeakRecorder, outside: Sequence[Tensor], runner: Any) -> None:
        self._recorder, self._outside, self._training = recorder, outside, runner.training
        self.num_bytes: int | None = None

    def reading(self) -> Any:
        """Context in which stages report."""
        original = LeanStage.backward_one_chunk

        @functools.wraps(original)
        def backward(stage: LeanStage, chunk: int, *args: Any, **kwargs: Any) -> None:
            if self.num_bytes is None:
                others = [*self._outside, *self._messages()]
                self.num_bytes = self._recorder.alive_bytes(excluding=others)
            original(stage, chunk, *args, **kwargs)

        return mock.patch.object(LeanStage, "backward_one_chunk", backward)

    def _messages(self) -> Iterator[Tensor]:
        """Yield values that were received and not used yet, losses and seeds of microbatches."""
        one = getattr(self._training, "_stage", None)
        for stage in getattr(self._training, "_stages", [one]):
            for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in received:
                    buffer = getattr(info, "buffer", None)
                    if buffer is not None and not buffer.is_meta:
                        yield buffer
            yield from stage.submod.feed.losses
            yield from (seed for seed in stage.submod.feed.seeds if seed is not None)


def _without_numbers(outside: list[Tensor]) -> Any:
    """Context that adds the numbers of microbatches, of which a schedule keeps views, to
    ``outside``."""
    original = runner_module.numbers

    def numbers(microbatches: int) -> Tensor:
        outside.append(original(microbatches))
        return outside[-1]

    return mock.patch.object(runner_module, "numbers", numbers)


def _before_reductions(pipeline: sp_compiler.PipelineModule, outside: list[Tensor]) -> Any:
    """Context that adds the gradients of a step to ``outside`` before their sums replace them."""
    original = pipeline._reduce_partial

    def reduce() -> None:
        outside.extend(pipeline._state.deferred.pending.values())
        outside.extend(p.grad for p in pipeline.parameters() if p.grad is not None)
        original()

    return mock.patch.object(pipeline, "_reduce_partial", reduce)


def _rows(models: Sequence[str], pp: int, tp: int) -> list[Row]:
    """Every setting on this rank."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
    return [
        _row(mesh, name, schedule, recompute) for name in models for schedule, recompute in SETTINGS
    ]


def _row(mesh: Any, name: str, schedule: str, recompute: str) -> Row:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (SAMPLES * MICROBATCHES, SEQUENCE))
    batch = {"input_ids": ids, "labels": ids.clone()}
    first = {key: value[:SAMPLES] for key, value in batch.items()}
    grid = f"pp={mesh['pp'].size()},tp={mesh['tp'].size()}"
    model, rank = MODELS[name](), mesh.get_local_rank("pp")
    settings: dict[str, Any] = {
        "microbatches": MICROBATCHES,
        "schedule": schedule,
        "recompute": recompute,
    }
    stage: StagePlan = sp_compiler.plan(model, ((), first), mesh=grid, **settings).stages[rank]
    pipeline = sp_compiler.pipeline(model, mesh=mesh, example_inputs=((), batch), **settings)
    pipeline.step(**batch)
    parameters = list(pipeline.parameters())
    outside = [*parameters, *pipeline.module.buffers(), *batch.values()]
    outside += [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Gradients exist, as they do from the second microbatch on; the sum of a tied one over the
    # stages is made anew in each step.
    for parameter_name, parameter in pipeline.named_parameters():
        if parameter_name in pipeline._ties.holders:
            parameter.grad = None
    with PeakRecorder() as recorder:
        (runner,) = pipeline._runners.values()
        kept = _Kept(recorder, outside, runner)
        with kept.reading(), _before_reductions(pipeline, outside), _without_numbers(outside):
            pipeline.step(**batch)
    delays = SCHEDULES[schedule].delays_weights
    return Row(
        name,
        schedule,
        recompute,
        rank,
        stage.activation_bytes,
        None if delays else kept.num_bytes,
        stage.activation_bytes + stage.working_bytes,
        recorder.peak_bytes(excluding=outside),
    )


def measured(models: Sequence[str], pp: int, tp: int) -> Iterator[Row]:
    """Rows of one rank of each stage; ranks of "tp" have the same."""
    results = run_on_ranks(pp * tp, _rows, models, pp, tp)
    for rows in zip(*results[::tp], strict=True):
        yield from rows


def main() -> None:
    """Print what was planned and measured; keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    found = list(measured(options.models, options.pp, options.tp))
    names = ("model", "schedule", "recompute", "rank", "kept planned", "measured", "peak planned")
    table = Table(*names, "measured", "off")
    for row in found:
        sizes = row.kept_planned, row.kept_measured, row.peak_planned, row.peak_measured
        texts = ["-" if size is None else bytes_text(size) for size in sizes]
        off = f"{100 * (row.peak_measured / row.peak_planned - 1):+.2f} %"
        table.add_row(row.model, row.schedule, row.recompute, str(row.rank), *texts, off)
    Console(width=140).print(table)
    compared = [row for row in found if row.kept_measured is not None]
    exact = sum(row.kept_planned == row.kept_measured for row in compared)
    worst = max(abs(row.peak_measured / row.peak_planned - 1) for row in found)
    print(
        f"{exact} of {len(compared)} keep what was planned, to the byte; peaks: {100 * worst:.2f} %"
    )
    if options.write:
        for name in options.models:
            rows = [asdict(row) for row in found if row.model == name]
            save(RESULTS / "stage_memory.json", name, rows, pp=options.pp, tp=options.tp)


if __name__ == "__main__":
    main()
