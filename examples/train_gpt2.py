"""Train an unmodified HuggingFace GPT-2 on two ranks, beside the same training on one.

Start it with ``make demo``, or::

    torchrun --standalone --nproc-per-node 2 -m examples.train_gpt2

The text is the source of Python's standard library, as bytes: it is on every machine. Dropout is
on. Both runs see the same batches and the same seeds, so the losses must agree to rounding.
"""

from __future__ import annotations

import copy
import statistics
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import sp_compiler
from benchmarks.measure import StepReport, Stopwatch, observe_step

STEPS = 100
BATCH = 8
LENGTH = 128
VOCABULARY = 256
HIDDEN = 256
LAYERS = 4
HEADS = 8
TEXT_BYTES = 4_000_000
PROMPT = b"def main(args):\n    "
OUTPUT = Path("demo-output")
MIB = 2**20


@dataclass
class Trainer:
    """A model, its optimizer, and what its training measured."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            # eps well above rounding: else Adam turns rounding errors into whole steps
            self.model.parameters(),
            lr=1e-3,
            betas=(0.9, 0.95),
            eps=1e-6,
            weight_decay=0.1,
            # By default DTensors are stepped one by one, a dozen dispatches for each.
            fused=True,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate)

    def step(self, ids: Tensor, seed: int) -> None:
        """One step on ``ids`` (b, s), dropout drawn from ``seed``."""
        torch.manual_seed(seed)
        with Stopwatch() as watch:
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
        self.step_ms.append(watch.ms)
        with Stopwatch() as watch:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.optimizer_ms.append(watch.ms)
        self.losses.append(float(loss.detach()))


def main() -> None:
    """Train, compare, and show what was done to the graph."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.set_verbosity_error()
    console = Console(quiet=dist.get_rank() != 0, width=100)
    started = time.perf_counter()
    text = standard_library()
    model = gpt2()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"GPT-2 with {millions:.1f} M parameters, dropout on, {len(text) / 1e6:.1f} MB of text, "
        f"{STEPS} steps of {BATCH} x {LENGTH} tokens\n"
    )
    ids = batch(text, 0)
    eager = observe(copy.deepcopy(model), ids)
    trainers = {
        world_size: Trainer(compiled(copy.deepcopy(model), world_size, ids, console))
        for world_size in (1, 2)
    }
    before = sample(trainers[2].model)
    train(trainers, text, console)
    after = sample(trainers[2].model)
    reports = {
        0: eager,
        **{world_size: observe(t.model, ids) for world_size, t in trainers.items()},
    }

    console.print(memory_table(trainers[2].model, reports))
    console.print(collectives_table(trainers[2].model, reports[2]))
    console.print(time_table(trainers))
    console.print(Panel(before, title="sample before", highlight=False))
    console.print(Panel(after, title="sample after", highlight=False))
    if dist.get_rank() == 0:
        write_out(trainers[2].model, console)
    console.print(f"all in {time.perf_counter() - started:.0f} s")
    dist.destroy_process_group()


def standard_library() -> Tensor:
    """The standard library's source as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(text: Tensor, step: int) -> Tensor:
    """(b, s) token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).long()


def gpt2() -> GPT2LMHeadModel:
    """A small GPT-2 over bytes, in the library's own code, with its default dropouts."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def learning_rate(step: int) -> float:
    """Factor on the learning rate: 20 steps up, then down to a tenth."""
    return min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / STEPS)


def compiled(model: torch.nn.Module, world_size: int, ids: Tensor, console: Console) -> Any:
    """``model`` compiled for ``world_size`` ranks: the one line that a user adds."""
    inputs: tuple[tuple[()], dict[str, Tensor]] = ((), {"input_ids": ids, "labels": ids})
    with Stopwatch() as watch:
        # Proven by numbers before the first step; leave verify out where compiling must be quick.
        result = sp_compiler.compile(model, tp=world_size, example_inputs=inputs, verify=True)
    console.print(f"compiled and verified for tp={world_size} in {watch.ms / 1e3:.1f} s")
    return result


def train(trainers: dict[int, Trainer], text: Tensor, console: Console) -> None:
    """All steps of all trainers, in turn, with a line now and then."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for step in progress.track(range(STEPS), description="training"):
            ids = batch(text, step)
            for trainer in trainers.values():
                trainer.step(ids, seed=step)
            if step % 10 == 9 or step == 0:
                one, two = (trainers[world_size].losses[-1] for world_size in (1, 2))
                console.print(
                    f"step {step + 1:4d}   loss at tp=2 {two:.6f}   at tp=1 {one:.6f}   "
                    f"difference {abs(two - one):.1e}"
                )


def observe(model: torch.nn.Module, ids: Tensor) -> StepReport:
    """Kept bytes and collectives of one step; gradients are dropped again."""
    model.train()
    report = observe_step(model, [ids], lambda: model(input_ids=ids, labels=ids))
    model.zero_grad()
    return report


def sample(model: torch.nn.Module) -> str:
    """Text drawn from the model: the window has a fixed length, what is not written yet is zero."""
    generator = torch.Generator().manual_seed(0)
    window = torch.zeros(1, LENGTH, dtype=torch.long)
    window[0, : len(PROMPT)] = torch.tensor(list(PROMPT))
    model.eval()
    with torch.no_grad():
        for position in range(len(PROMPT), LENGTH):
            logits = model(input_ids=window).logits[0, position - 1].float()
            probabilities = torch.softmax(logits / 0.7, -1)
            window[0, position] = torch.multinomial(probabilities, 1, generator=generator)
    model.train()
    characters = bytes(window[0].tolist()).decode("ascii", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in characters)


def memory_table(model: Any, reports: dict[int, StepReport]) -> Table:
    """Bytes kept for backward on one rank: the paper's formula, the plan, and measured."""
    table = Table("MiB per rank", "formula", "plan", "measured", title="memory kept for backward")
    table.add_row("the paper's GPT, one device", mib(paper_bytes(1, selective=False)), "", "")
    table.add_row("this GPT-2, eager, one device", "", "", kept(reports[0]))
    table.add_row("the paper's TP + SP + selective", mib(paper_bytes(2, selective=True)), "", "")
    table.add_row("sp_compiler, tp=1", "", "", kept(reports[1]))
    table.add_row("sp_compiler, tp=2", "", mib(model.plan.activation_bytes), kept(reports[2]))
    return table


def paper_bytes(tp: int, *, selective: bool) -> float:
    """The paper's formulas (arXiv 2205.05198, table 2 and section 4.3) for float32 activations.

    16 two-byte values and 2 mask bytes a token and channel are the paper's 34sbh; with 4-byte
    values that is 66sbh. Attention scores: two values and a mask, 9 bytes for the paper's 5.
    """
    tokens = BATCH * LENGTH * HIDDEN / tp
    scores = 0 if selective else 9 * HEADS * BATCH * LENGTH**2 / tp
    blocks = LAYERS * (66 * tokens + scores)
    embedding_mask, final_norm, head = tokens, 4 * tokens, 4 * tokens
    return blocks + embedding_mask + final_norm + head + 4 * BATCH * LENGTH * VOCABULARY / tp


def kept(report: StepReport) -> str:
    """Measured kept bytes as text."""
    return mib(report.kept_bytes)


def mib(num_bytes: float) -> str:
    """Bytes as MiB."""
    return f"{num_bytes / MIB:.2f}"


def time_table(trainers: dict[int, Trainer]) -> Table:
    """Median times; both ranks run the tp=1 model at once, one core each."""
    table = Table("ms, median", *(f"tp={world_size}" for world_size in trainers), title="step time")
    for name, values in (
        ("forward + backward", [t.step_ms for t in trainers.values()]),
        ("clip + AdamW", [t.optimizer_ms for t in trainers.values()]),
    ):
        table.add_row(name, *(f"{statistics.median(times[5:]):.0f}" for times in values))
    return table


def collectives_table(model: Any, report: StepReport) -> Table:
    """Table of the messages of one step; the broadcast is the dropout seed's."""
    table = Table("kind", "planned", "forward", "backward", "MiB", title="collectives, tp=2")
    planned = {item.kind.replace("_", "-"): item.count for item in model.plan.collectives}
    for kind in sorted(report.wire_bytes):
        counts = planned.get(kind, 0), report.forward.get(kind, 0), report.backward.get(kind, 0)
        table.add_row(kind, *map(str, counts), mib(report.wire_bytes[kind]))
    return table


def write_out(model: Any, console: Console) -> None:
    """Write what the compiler made: the code that ran, the diff of the graph, every stage."""
    OUTPUT.mkdir(exist_ok=True)
    files = {
        "generated.py": str(model.code),
        "capture-to-final.diff": str(model.diff("capture", "final")),
        "plan.txt": str(model.plan),
    }
    for name, text in files.items():
        OUTPUT.joinpath(name).write_text(text, encoding="utf-8")
        console.print(f"wrote {OUTPUT / name} ({len(text.splitlines())} lines)")


if __name__ == "__main__":
    main()
