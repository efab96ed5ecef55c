"""Steps and compilations with ``backend="inductor"``, eager code and ``torch.compile``.

CPU time, one thread per rank, hidden 512, float32, every dropout probability 0.1. Three runs::

    one-device   tp=1, with and without recomputation, against torch.compile(model) and eager
    two-ranks    2 gloo ranks, kernels against the generated text
    compile      first step in a new process: cold, with a filled cache; torch.compile for one block

    python -m benchmarks.inductor_time [--rounds 12] [--only one-device] [--write]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, multiprocessing, nn
from torch._inductor import config as inductor_config

import sp_compiler
from benchmarks.contenders import Step, plain_gpt
from benchmarks.measure import Stopwatch, alternate, ratio
from benchmarks.models import GPTConfig
from benchmarks.performance import keep

BATCH, LENGTH = 2, 512
WIDTH, VOCABULARY, HEADS, DROPOUT = 512, 8192, 8, 0.1
LAYERS = 4
DEPTHS = (1, 4)
INDUCTOR, TORCH = "inductor", "torch.compile(model)"
RUNS = ("one-device", "two-ranks", "compile")


@dataclass(frozen=True)
class Row:
    """One contender of a run.

    Args:
        ratio: the time of "inductor" in units of this contender's: below 1 it is faster.
        saved_mib: what it saves for backward on a rank, parameters not counted.
    """

    setting: str
    contender: str
    median_ms: float
    ratio: float
    saved_mib: float


def _gpt(
    layers: int,
    *,
    length: int = LENGTH,
    width: int = WIDTH,
    heads: int = HEADS,
    dropout: float = DROPOUT,
) -> nn.Module:
    return plain_gpt(
        GPTConfig(
            vocab_size=VOCABULARY,
            num_positions=length,
            hidden_size=width,
            num_layers=layers,
            num_heads=heads,
            dropout=dropout,
            attention_dropout=dropout,
        )
    )


def _llama(
    layers: int,
    *,
    length: int = LENGTH,
    width: int = WIDTH,
    heads: int = HEADS,
    dropout: float = DROPOUT,
) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        attention_dropout=dropout,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[..., nn.Module]] = {"GPT": _gpt, "Llama": _llama}


def random_inputs(batch: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _compiled(model: nn.Module, tp: int, backend: str, recompute: str = "selective") -> nn.Module:
    return sp_compiler.compile(
        model, tp=tp, backend=backend, recompute=recompute, example_inputs=((), random_inputs())
    )


def _step(model: nn.Module) -> Step:
    inputs = random_inputs()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs)[0].backward()

    return step


def _saved_bytes(model: nn.Module) -> int:
    """Storages that autograd saves in a forward, once each, without those of the model."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        local = getattr(x, "_local_tensor", x)
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(**random_inputs())
    for tensor in (*model.parameters(), *model.buffers()):
        local = getattr(tensor, "_local_tensor", tensor)
        storages.pop(local.untyped_storage().data_ptr(), None)
    del output
    return sum(storages.values())


def _rows(
    setting: str, models: Mapping[str, nn.Module], rounds: int, before: Callable[[], Any]
) -> list[Row]:
    steps = {name: _step(model) for name, model in models.items()}
    # CPU time, which does not include other programs on a shared machine.
    times = alternate(steps, rounds=rounds, before=before, clock=time.process_time)
    return [
        Row(
            setting,
            name,
            statistics.median(times[name]),
            ratio(times, INDUCTOR, name),
            _saved_bytes(model) / 2**20,
        )
        for name, model in models.items()
    ]


def one_device(rounds: int) -> list[Row]:
    """tp=1 against ``torch.compile`` and eager."""
    rows = []
    for name, build in MODELS.items():
        models: dict[str, Any] = {
            INDUCTOR: _compiled(build(LAYERS), 1, "inductor"),
            "inductor_pointwise": _compiled(build(LAYERS), 1, "inductor_pointwise"),
            "inductor, recompute=none": _compiled(build(LAYERS), 1, "inductor", "none"),
            "eager code": _compiled(build(LAYERS), 1, "eager"),
            TORCH: torch.compile(build(LAYERS)),
            "the model itself": build(LAYERS),
        }
        rows += _rows(f"{name}, tp=1", models, rounds, lambda: None)
    return rows


def _two_ranks(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    rows = []
    for name, build in MODELS.items():
        models = {
            INDUCTOR: _compiled(build(LAYERS), 2, "inductor"),
            "inductor_pointwise": _compiled(build(LAYERS), 2, "inductor_pointwise"),
            "inductor, recompute=none": _compiled(build(LAYERS), 2, "inductor", "none"),
            "eager code": _compiled(build(LAYERS), 2, "eager"),
        }
        rows += _rows(f"{name}, tp=2", models, rounds, dist.barrier)
    if rank == 0:
        torch.save([asdict(row) for row in rows], f"{folder}/rows")
    dist.destroy_process_group()


def two_ranks(rounds: int) -> list[Row]:
    """Kernels against the generated text, on 2 gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_two_ranks, (folder, rounds), nprocs=2)
        return [Row(**row) for row in torch.load(f"{folder}/rows")]


def _first_step(name: str, contender: str, layers: int) -> dict[str, float]:
    """CPU seconds of this process and its compilers until the first step is done, by phase."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = MODELS[name](layers)

    def clock() -> float:
        return sum(os.times()[:4])  # with those of children, which have ended

    # One process compiles, as its children are counted only when they end.
    with inductor_config.patch(compile_threads=1):
        with Stopwatch(clock) as preparation:
            if contender == TORCH:
                compiled: Any = torch.compile(model)
            else:
                compiled = _compiled(model, 1, contender)
        with Stopwatch(clock) as first:
            _step(compiled)()
    with Stopwatch(clock) as later:
        _step(compiled)()
    return {
        "compile": preparation.ms / 1e3,
        "first_step": (first.ms - later.ms) / 1e3,
        "both": (preparation.ms + first.ms - later.ms) / 1e3,
    }


def _in_new_process(cache: str, *arguments: Any) -> dict[str, float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_first_step, *arguments).result()


def compilation(_: int) -> list[dict[str, Any]]:
    """Seconds of the first step, cold and with a filled cache, in one round."""
    rows = []
    for contender, depths in ((INDUCTOR, DEPTHS), (TORCH, DEPTHS)):
        for layers in depths:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    seconds = _in_new_process(cache, "GPT", contender, layers)
                    where = {"contender": contender, "layers": layers, "cache": state}
                    rows.append({**where, **seconds})
    return rows


def _table(run: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(*rows[0], title=run)
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    return table


def main() -> None:
    """Run what was asked for; print each as a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=RUNS, action="append")
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    functions: dict[str, Callable[[int], list[Any]]] = dict(
        zip(RUNS, (one_device, two_ranks, compilation), strict=True)
    )
    for name in options.only or RUNS:
        found = functions[name](options.rounds)
        rows = [row if isinstance(row, dict) else asdict(row) for row in found]
        Console().print(_table(name, rows))
        if options.write:
            rounds = 1 if name == "compile" else options.rounds
            keep("inductor_time", name, rows, rounds=rounds)


if __name__ == "__main__":
    main()
