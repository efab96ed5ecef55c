"""CPU time of a step on a grid, compared with hand-written code in torch's own engines.

Four gloo processes, float32, one thread each; the plain GPT of 4 layers, hidden 256. Two runs::

    fsdp       dp_shard 2 x tp 2: hand-written tensor-parallel layers under the same FSDP2
    pipeline   pp 4, 1F1B: torch's stages and schedule over stages cut by hand at the same layers,
               as they are and each compiled by sp_compiler

A time is the sum over all processes. They wait for each other without computing, so a machine with
fewer cores than processes, or with other load, does not change it. Both sides use torch's
schedules, so equal times of stages mean equal waits.

    python -m benchmarks.grid_time [--rounds 10] [--only fsdp] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import sp_compiler
from benchmarks.contenders import PRODUCT, plain_gpt, random_ids
from benchmarks.measure import alternate, ratio
from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.peers.megatron_style import MegatronStyleGPT
from benchmarks.performance import keep
from benchmarks.step_time import Row, table
from tests.helpers.ranks import run_on_ranks

RANKS, LENGTH = 4, 128
SAMPLES = 8  # of a part of the data
MICROBATCHES, MICRO = 8, 2  # samples of a microbatch
RUNS = ("fsdp", "pipeline")
Step = Callable[[], Tensor]


def _config() -> GPTConfig:
    return GPTConfig(
        vocab_size=1024, num_positions=LENGTH, hidden_size=256, num_layers=4, num_heads=8,
        dropout=0.0, attention_dropout=0.0, tied_head=True,
    )  # fmt: skip


def fsdp(rounds: int) -> list[Row]:
    """On a rank of the grid: this project beside the hand-written layers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    part, parts = sp_compiler.data_shard(mesh)
    ids = random_ids(_config(), parts * SAMPLES, LENGTH).chunk(parts)[part]
    ours = sp_compiler.compile(
        plain_gpt(_config()), mesh=mesh, recompute="none", example_inputs=((ids,), {"labels": ids})
    )
    theirs: Any = MegatronStyleGPT(plain_gpt(_config()), mesh.get_group("tp"))
    for block in (*theirs.blocks, theirs):
        fully_shard(block, mesh=mesh["dp_shard"])

    def our_step() -> Tensor:
        ours.zero_grad(set_to_none=True)
        loss = ours(ids, labels=ids)[0]
        loss.backward()
        return loss.detach()

    def their_step() -> Tensor:
        theirs.zero_grad(set_to_none=True)
        loss = theirs(ids, ids)
        loss.backward()
        theirs.finish_gradients()
        return loss.detach()

    return _rows(
        "dp_shard=2, tp=2", {PRODUCT: our_step, "Megatron style + FSDP2": their_step}, rounds
    )


class Part(nn.Module):
    """A stage cut by hand: some blocks of the plain GPT, with what is before or behind them."""

    def __init__(self, model: PlainGPT, start: int, end: int) -> None:
        super().__init__()
        self.blocks = model.blocks[start:end]
        self.is_first, self.is_last = start == 0, end == len(model.blocks)
        if self.is_first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
        if self.is_last:
            self.final_norm, self.head = model.final_norm, model.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Ids or hidden states (b, s, h) to hidden states, or the loss of a microbatch."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        if labels is None:
            return x
        logits = self.head(self.final_norm(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def _by_hand(part: nn.Module, mesh: DeviceMesh, ids: Tensor, example: Tensor) -> Step:
    """A step of torch's own pipeline with ``part`` as this rank's stage."""
    rank = dist.get_rank()
    is_last = rank == RANKS - 1
    hidden = torch.empty(MICRO, LENGTH, _config().hidden_size, device="meta").requires_grad_()
    stage = PipelineStage(
        part, rank, RANKS, torch.device("cpu"),
        input_args=(hidden if rank else example.to("meta"),),
        output_args=(torch.empty((), device="meta") if is_last else hidden,),
        group=mesh.get_group(),
    )  # fmt: skip
    schedule = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda loss, _: loss / MICROBATCHES, scale_grads=False
    )

    def step() -> Tensor:
        part.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if is_last:
            schedule.step(target=ids, losses=losses, labels=ids, return_outputs=False)
        else:
            schedule.step(*((ids,) if rank == 0 else ()))
        loss = sum(losses, torch.zeros(())).detach()
        dist.broadcast(loss, RANKS - 1)
        return loss

    return step


def pipeline(rounds: int) -> list[Row]:
    """On a rank of the pipeline: this project beside stages that are cut by hand."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    config = _config()
    ids = random_ids(config, MICRO * MICROBATCHES, LENGTH)
    ours = sp_compiler.pipeline(
        _untied(), mesh=mesh, example_inputs=((ids,), {"labels": ids}),
        microbatches=MICROBATCHES, schedule="1f1b", recompute="none",
    )  # fmt: skip
    rank = dist.get_rank()
    counts = [sum(path != "" for path in paths) for paths in ours.stages]
    start = sum(counts[:rank])
    parts = [Part(_untied(), start, start + counts[rank]) for _ in range(2)]
    micro = ids.chunk(MICROBATCHES)[0]
    example = micro if rank == 0 else torch.rand(*micro.shape, config.hidden_size)
    inputs = (example.requires_grad_(rank > 0),), {"labels": micro} if parts[0].is_last else {}
    compiled = sp_compiler.compile(parts[1], tp=1, recompute="none", example_inputs=inputs)

    def our_step() -> Tensor:
        ours.module.zero_grad(set_to_none=True)
        return ours.step(ids, labels=ids)

    steps = {
        PRODUCT: our_step,
        "torch, stages by hand": _by_hand(parts[0], mesh, ids, example),
        "torch, these compiled": _by_hand(compiled, mesh, ids, example),
    }
    return _rows("pp=4, 1F1B", steps, rounds)


def _untied() -> PlainGPT:
    model = plain_gpt(_config())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _rows(setting: str, steps: Mapping[str, Step], rounds: int) -> list[Row]:
    losses = torch.stack([step() for step in steps.values()])
    torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-5, atol=0.0)
    times = alternate(steps, rounds=rounds, before=dist.barrier, clock=time.process_time)
    totals = torch.tensor([*times.values()])
    dist.all_reduce(totals)
    times = {name: row.tolist() for name, row in zip(times, totals, strict=True)}
    return [
        Row(setting, name, statistics.median(values), ratio(times, PRODUCT, name))
        for name, values in times.items()
    ]


def main() -> None:
    """Run what was asked for; print each as a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=RUNS, action="append")
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    functions = dict(zip(RUNS, (fsdp, pipeline), strict=True))
    for name in options.only or RUNS:
        rows = run_on_ranks(RANKS, functions[name], options.rounds)[0]
        Console().print(table(name, rows))
        if options.write:
            keep("step_time", name, map(asdict, rows), rounds=options.rounds)


if __name__ == "__main__":
    main()
