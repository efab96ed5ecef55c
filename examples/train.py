"""Train any causal language model of HuggingFace on text files, on a grid of GPUs or CPUs.

One machine with 8 GPUs, 2 batches of 4 sequences, each on 4 GPUs::

    torchrun --nproc-per-node 8 -m examples.train --model gpt2 --tp 4 --dp-shard 2 \
        --text books/*.txt --folder runs/gpt2 --precision bfloat16

``--model`` is a ``config.json``, a folder or a name of the hub; ``--pretrained`` starts from the
safetensors of a folder. With ``--pp`` layers are spread over stages, which run one forward each of
``--accumulate`` in turns. Text is read as bytes unless there is a ``--tokenizer``. The same command
again goes on from the last complete checkpoint in ``--folder``: with the same losses to the bit on
the same grid, up to rounding and to other dropout masks on one with as many sequences per step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

import sp_compiler
from examples.processes import Parser, Places, grid, said_once
from examples.tokens import Tokens


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="config.json, folder, or name on the hub")
    add("--pretrained", action="store_true", help="start from the safetensors in --model")
    add("--text", nargs="+", type=Path, required=True, help="text files")
    add("--tokenizer", default="bytes", help="folder or name; default: bytes")
    add("--folder", type=Path, required=True, help="checkpoints, metrics, final weights")
    add("--tp", type=int, default=1, help="ranks that share a batch")
    add("--pp", type=int, default=1, help="stages that the layers are spread over")
    add("--schedule", default="1f1b", help="of the stages, see sp_compiler.pipeline")
    add("--dp-shard", type=int, default=1, help="batches, parameters sharded over them")
    add("--dp-replicate", type=int, default=1, help="times that all of it is repeated")
    add("--precision", choices=("float32", "bfloat16"), default="float32", help="of the products")
    add("--recompute", default="selective", help="see sp_compiler.compile")
    add("--sequence-length", type=int, default=512)
    add("--batch", type=int, default=4, help="sequences of one forward of one tp group")
    add("--accumulate", type=int, default=1, help="forwards per step")
    add("--steps", type=int, default=1000)
    add("--lr", type=float, default=3e-4, help="peak learning rate")
    add("--warmup", type=int, default=100, help="steps up to it")
    add("--min-lr", type=float, default=0.1, help="part of it that is left at the end")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of all gradients")
    add("--seed", type=int, default=0)
    add("--rank-timeout", type=float, default=300.0, help="seconds to wait for another rank")
    add("--evaluate-every", type=int, default=100, help="steps; 0: never")
    add("--evaluate-batches", type=int, default=8)
    add("--save-every", type=int, default=100, help="steps; 0: at the end only")
    add("--log-every", type=int, default=10)
    add("--peak-tflops", type=float, default=989.0, help="of one device, for the MFU")
    args = parser.parse_args(argv)
    if args.pretrained and not Path(args.model).is_dir():
        parser.error(
            f"--pretrained reads safetensors from a folder, and --model {args.model} is none: give "
            "the folder that save_pretrained wrote, or that a name was downloaded to"
        )
    return args


class Checkpoints:
    """Checkpoints of a run, one folder each; one that is not complete is never found."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, trainer: Trainer) -> None:
        """Save at the present step; every rank writes its part."""
        done = self._folder / f"step_{trainer.step:08d}"
        partial = done.with_suffix(".partial")
        trainer.places.enter(f"the checkpoint of step {trainer.step}")
        if dist.get_rank() == 0:
            # Of a run that was killed while it saved, on another grid perhaps.
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        dcp.save(trainer.state(), checkpoint_id=str(partial))
        # All parts are there once all ranks are here; a rename happens or does not.
        dist.barrier()
        if dist.get_rank() == 0:
            partial.rename(done)
        dist.barrier()

    def load_latest(self, trainer: Trainer) -> bool:
        """Go on from the last one, whatever grid wrote it; ``False`` where there is none."""
        found = sorted(self._folder.glob("step_????????"))
        # What one rank sees all ranks load: file systems show new folders late.
        latest = [str(found[-1]) if found else ""]
        dist.broadcast_object_list(latest, src=0)
        if not latest[0]:
            return False
        state = trainer.state()
        dcp.load(state, checkpoint_id=latest[0])
        trainer.load(state)
        return True

    def export(self, args: argparse.Namespace) -> None:
        """Write the weights of the last one as the model's own, on the first rank."""
        if dist.get_rank() == 0:
            last = max(self._folder.glob("step_????????"))
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=str(last), no_dist=True)
            model.load_state_dict(state["model"])
            weights, partial = args.folder / "model", args.folder / "model.partial"
            model.save_pretrained(partial)
            shutil.rmtree(weights, ignore_errors=True)
            partial.rename(weights)
        dist.barrier()


# By parameter, not by group: stages and grids have other groups of parameters.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Trainer:
    """A module on its grid, its optimizer, and how far it is."""

    def __init__(
        self, args: argparse.Namespace, mesh: DeviceMesh, tokens: Tokens, places: Places
    ) -> None:
        self.args, self.mesh, self.tokens, self.places = args, mesh, tokens, places
        self.device = torch.device(mesh.device_type)
        self.part, self.parts = sp_compiler.data_shard(mesh)
        self.step = 0
        self.sequences = args.batch * args.accumulate * self.parts  # of a step, on all ranks
        # A pipeline is given all forwards of a step at once.
        self.batch = args.batch * (args.accumulate if args.pp > 1 else 1)
        self.module: Any = self._compiled()
        matrices = [p for p in self.module.parameters() if p.ndim > 1]
        vectors = [p for p in self.module.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
        )

    def _compiled(self) -> Any:
        args = self.args
        config = AutoConfig.from_pretrained(args.model)
        config.use_cache = False
        torch.manual_seed(args.seed)  # the same weights on every rank
        with torch.device("meta" if args.pretrained else self.device):
            model = AutoModelForCausalLM.from_config(config).train()
        ids = torch.zeros(self.batch, args.sequence_length, dtype=torch.long, device=self.device)
        build: Any = sp_compiler.compile
        options: dict[str, Any] = {}
        if args.pp > 1:
            build = sp_compiler.pipeline
            options |= {"microbatches": args.accumulate, "schedule": args.schedule}
        if args.precision == "bfloat16" and self.parts > 1:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["fsdp"] = {"mp_policy": policy}
        with self._autocast():
            module = build(
                model,
                mesh=self.mesh,
                example_inputs=((), {"input_ids": ids, "labels": ids}),
                recompute=args.recompute,
                rank_timeout=args.rank_timeout,
                **options,
            )
        if args.pretrained:
            module.load_pretrained(args.model)
        return module

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.args.precision == "float32" or self.parts > 1:  # where FSDP casts parameters
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _loss(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.device)
        with self._autocast():
            loss: Tensor = self.module(input_ids=ids, labels=ids).loss
        return loss

    def learning_rate(self) -> float:
        """Up in a line, then down half a cosine."""
        args = self.args
        if self.step < args.warmup:
            return float(args.lr * (self.step + 1) / args.warmup)
        progress = (self.step - args.warmup) / max(1, args.steps - args.warmup)
        falling = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return float(args.lr * (args.min_lr + (1 - args.min_lr) * falling))

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; the mean loss, not yet reduced, and the norm of the gradients."""
        args = self.args
        windows = self.tokens.training(self.step * self.sequences, self.sequences)
        own = windows.chunk(self.parts)[self.part]
        self.places.enter(f"forward and backward of step {self.step + 1}")
        total = self._pipelined(own) if args.pp > 1 else self._accumulated(own)
        norm = sp_compiler.clip_grad_norm_(self.module, args.clip)
        self.places.enter(f"the optimizer of step {self.step + 1}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.places.enter(f"the end of step {self.step}")
        return total, norm

    def _accumulated(self, own: Tensor) -> Tensor:
        """Forward and backward of this part of the data; its mean loss."""
        args, total = self.args, torch.zeros((), device=self.device)
        for index, ids in enumerate(own.split(args.batch)):
            last = index == args.accumulate - 1
            # One switch for all axes: gradients are reduced once a step.
            with contextlib.nullcontext() if last else self.module.no_sync():
                loss = self._loss(ids) / args.accumulate
                loss.backward()
            total += loss.detach()
        return total

    def _pipelined(self, own: Tensor) -> Tensor:
        """The same, by stages."""
        ids = own.to(self.device)
        with self._autocast():
            total: Tensor = self.module.step(input_ids=ids, labels=ids)
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on text that is not trained on."""
        args, total = self.args, torch.zeros((), device=self.device)
        self.places.enter(f"the evaluation of step {self.step}")
        for index in range(args.evaluate_batches):
            first = (index * self.parts + self.part) * self.batch
            total += self._evaluated(self.tokens.evaluation(first, self.batch))
        return self.mean(total / args.evaluate_batches)

    def _evaluated(self, ids: Tensor) -> Tensor:
        if self.args.pp > 1:
            with self._autocast():
                loss: Tensor = self.module.eval_loss(input_ids=ids, labels=ids)
            return loss
        self.module.eval()
        loss = self._loss(ids)
        self.module.train()
        return loss

    def mean(self, value: Tensor) -> float:
        """Mean over all ranks."""
        dist.all_reduce(value)
        return float(value / dist.get_world_size())

    def state(self) -> dict[str, Any]:
        """Contents of a checkpoint; ranks have the same random numbers in the same places."""
        return {
            "model": self.module.state_dict(),
            "optimizer": get_optimizer_state_dict(self._tree(), self.optimizer, options=_FLAT),
            "progress": {
                "step": torch.tensor(self.step),
                "sequences": torch.tensor(self.sequences),
            },
            "random": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        before = int(state["progress"]["sequences"])
        if before != self.sequences:
            raise SystemExit(
                f"the checkpoint was trained on {before} sequences per step, this run has "
                f"{self.sequences}: change --batch or --accumulate"
            )
        self.module.load_state_dict(state["model"])
        set_optimizer_state_dict(
            self._tree(), self.optimizer, optim_state_dict=state["optimizer"], options=_FLAT
        )
        self.step = int(state["progress"]["step"])
        torch.set_rng_state(state["random"])

    def _tree(self) -> torch.nn.Module:
        tree: torch.nn.Module = self.module.module if self.args.pp > 1 else self.module
        return tree


class Log:
    """Lines for people, ``metrics.jsonl`` and, where it is installed, TensorBoard; on rank 0."""

    def __init__(self, folder: Path) -> None:
        self._writes = dist.get_rank() == 0
        self._board: Any = None
        self._file = folder / "metrics.jsonl"
        if self._writes:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"))

    def say(self, text: str) -> None:
        """Print ``text``."""
        if self._writes:
            print(text, flush=True)

    def record(self, step: int, **numbers: float) -> None:
        """Numbers of a step."""
        if not self._writes:
            return
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")
        print(
            f"step {step:6d}  " + "  ".join(f"{k} {v:.5g}" for k, v in numbers.items()), flush=True
        )
        for name, value in numbers.items():
            if self._board is not None:
                self._board.add_scalar(name, value, step)


def train(args: argparse.Namespace, mesh: DeviceMesh, places: Places) -> None:
    """Train from the last checkpoint, or the start, to the last step."""
    log = Log(args.folder)
    tokens = Tokens.read(args.text, args.tokenizer, args.sequence_length, args.seed)
    trainer = Trainer(args, mesh, tokens, places)
    log.say(str(trainer.module.plan))
    checkpoints = Checkpoints(args.folder)
    if checkpoints.load_latest(trainer):
        log.say(f"going on from step {trainer.step}")
    tokens_per_step = trainer.sequences * args.sequence_length
    # Of one rank, in a step; the plan is that of all stages together.
    flops = trainer.module.plan.work.model_flops * args.accumulate / args.pp
    steps_done, started = 0, time.perf_counter()
    while trainer.step < args.steps:
        loss, norm = trainer.train_step()
        steps_done += 1
        if _due(trainer.step, args.log_every, args.steps):
            mean = trainer.mean(loss)  # waits for the device
            seconds = (time.perf_counter() - started) / steps_done
            log.record(
                trainer.step,
                loss=mean,
                norm=float(norm),
                lr=trainer.optimizer.param_groups[0]["lr"],
                tokens_per_s=tokens_per_step / seconds,
                mfu=flops / seconds / (args.peak_tflops * 1e12),
            )
            steps_done, started = 0, time.perf_counter()
        paused = time.perf_counter()
        if args.evaluate_every and _due(trainer.step, args.evaluate_every, args.steps):
            log.record(trainer.step, evaluation_loss=trainer.evaluate())
        if _due(trainer.step, args.save_every, args.steps):
            checkpoints.save(trainer)
        started += time.perf_counter() - paused  # evaluation and saving belong to no step
    checkpoints.export(args)
    log.say(f"weights: {args.folder / 'model'}")


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


if __name__ == "__main__":
    ARGS = parsed()
    with said_once(), grid(ARGS) as (MESH, PLACES):
        train(ARGS, MESH, PLACES)
