"""Measurements on an accelerator: memory against plans, numbers against the CPU, times of peers.

    python -m benchmarks.gpu [--device cuda] [--only memory numbers slices] [--small] [--write]

memory    bytes kept and the peak of a step of ten models as planned, as the operators made them,
          and as the allocator counted them, one rank
numbers   loss and gradients of the same models on the device against the CPU, dropout included
slices    one rank's part of 8 of a layer of the paper's 22B and 175B and of Llama-3-70B, the other
          ranks being a fake process group whose collectives cost nothing: the product beside
          hand-written Megatron-style layers, and beside the unsharded layer in eager mode; on an
          accelerator also with steps that are replayed

``--device cpu --small`` runs all of it without an accelerator: its logic, not its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import sp_compiler
from benchmarks import contenders
from benchmarks.contenders import PRODUCT, PRODUCT_GRAPHS, Step
from benchmarks.measure import PeakRecorder, alternate, loss_of, ratio
from benchmarks.models import PAPER_SETUPS, GPTConfig
from benchmarks.peers.recompute import Recompute
from benchmarks.performance import RESULTS, save
from tests.models import architectures
from tests.models.architecture import Size

MODELS = (
    "gpt2", "llama", "mixtral", "gemma2", "phi3", "falcon", "bert", "t5", "whisper", "nanogpt",
)  # fmt: skip
RANKS = 8
DROPOUT = 0.1
RECOMPUTES = ("none", "selective")
PARTS = ("memory", "numbers", "slices")
LARGE = Size(16, 8, 1024, 4096, 32000, 2, 512, 8, DROPOUT)
SMALL = replace(architectures.size("dividing", 1), dropout=DROPOUT)
# The vocabulary is small: the head would hide the layer.
_LAYER_VOCABULARY = 1024


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


@dataclass(frozen=True)
class SliceRow:
    """One contender: ``ratio`` is the product's time in units of this contender's."""

    setting: str
    contender: str
    step_ms: float
    ratio: float


Row = MemoryRow | NumbersRow | SliceRow


def memory(device: str, size: Size) -> Iterator[MemoryRow]:
    """Each of the models on one rank."""
    for name in MODELS:
        model, inputs = _model(name, size, device)
        module = sp_compiler.compile(model, tp=1, example_inputs=((), inputs))
        yield _memory(name, module, inputs)


def _memory(name: str, module: Any, inputs: Mapping[str, Tensor]) -> MemoryRow:
    # Once before: what kernels and libraries allocate for good is no part of a step.
    loss_of(module(**inputs)).backward()
    module.zero_grad(set_to_none=True)
    gc.collect()
    on_cuda = next(module.parameters()).is_cuda
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _requested("current") if on_cuda else 0
    with PeakRecorder() as recorder:
        output = module(**inputs)
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        # Views of constants are made in every forward, and their memory in none.
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
        # What was asked for: blocks are larger, by up to 511 bytes each.
        _requested("peak") - before if on_cuda else None,
    )


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


def slices(device: str, *, small: bool, rounds: int) -> Iterator[SliceRow]:
    """The product, hand-written layers and the unsharded layer, dropout on and off."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        for label, config, batch in _layers(small=small):
            ids = contenders.random_ids(config, batch, config.num_positions).to(device)
            for dropout in (0.0, DROPOUT):
                sized = replace(config, dropout=dropout, attention_dropout=dropout)
                for recompute in RECOMPUTES:
                    setting = f"{label}, dropout={dropout}, recompute={recompute}"
                    with _on(device):
                        steps = _gpt_steps(sized, ids, recompute)
                    yield from _timed(setting, device, steps, rounds)
        for recompute in RECOMPUTES:
            with _on(device):
                steps = _llama_steps(device, recompute, small=small)
            setting = f"Llama-3-70B, recompute={recompute}"
            yield from _timed(setting, device, steps, rounds)
    finally:
        dist.destroy_process_group()


def _layers(*, small: bool) -> Iterator[tuple[str, GPTConfig, int]]:
    for label in ("gpt-22b", "gpt3-175b"):
        setup = PAPER_SETUPS[label]
        config = replace(setup.model, num_layers=1, vocab_size=_LAYER_VOCABULARY)
        if small:
            config = replace(config, hidden_size=64, num_heads=8, num_positions=32)
        yield label, config, setup.micro_batch


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """New tensors are on ``device``, and of 16 bits on an accelerator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _gpt_steps(config: GPTConfig, ids: Tensor, recompute: str) -> dict[str, Step]:
    # The peers, which lack the product's "selective", recompute the attention core.
    by_hand: Recompute = "attention" if recompute == "selective" else "none"
    recorded = (
        {PRODUCT_GRAPHS: contenders.compiled(config, ids, recompute, RANKS, cuda_graphs=True)}
        if ids.is_cuda
        else {}
    )
    return {
        PRODUCT: contenders.compiled(config, ids, recompute, RANKS),
        **recorded,
        "Megatron style TP+SP": contenders.megatron_style(config, ids, by_hand, sp=True),
        "eager, unsharded": contenders.eager(config, ids, by_hand),
    }


def _llama_steps(device: str, recompute: str, *, small: bool) -> dict[str, Step]:
    """A layer of Llama-3-70B; no part of a rank is written by hand for it."""
    sizes = (
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
        if small
        else {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    )
    config = transformers.LlamaConfig(
        vocab_size=_LAYER_VOCABULARY, num_hidden_layers=1, num_key_value_heads=8, **sizes
    )
    generator = torch.Generator().manual_seed(1)
    shape = (2, 16) if small else (1, 8192)
    ids = torch.randint(_LAYER_VOCABULARY, shape, generator=generator, device="cpu").to(device)

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    module: Any = sp_compiler.compile(
        model(), tp=RANKS, recompute=recompute, example_inputs=((), inputs)
    )
    unsharded = model()

    def step(of: Any) -> Step:
        def run() -> None:
            of.zero_grad(set_to_none=True)
            of(**inputs).loss.backward()

        return run

    return {PRODUCT: step(module), "eager, unsharded": step(unsharded)}


def _timed(setting: str, device: str, steps: Mapping[str, Step], rounds: int) -> Iterator[SliceRow]:
    def ended(step: Step) -> Step:
        def run() -> None:
            step()
            if device != "cpu":
                torch.cuda.synchronize()  # a launch returns long before its kernel ends

        return run

    times = alternate({name: ended(step) for name, step in steps.items()}, rounds=rounds)
    for name, values in times.items():
        yield SliceRow(setting, name, statistics.median(values), ratio(times, PRODUCT, name))


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
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "memory": lambda: memory(options.device, size),
        "numbers": lambda: numbers(options.device, size),
        "slices": lambda: slices(options.device, small=options.small, rounds=options.rounds),
    }
    for part in options.only:
        rows = [asdict(row) for row in makers[part]()]
        table = Table(*rows[0], title=part)
        for row in rows:
            table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
        Console().print(table)
        if options.write:
            save(RESULTS / "gpu.json", part, rows, small=options.small)


if __name__ == "__main__":
    main()
