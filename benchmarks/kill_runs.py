"""Kill ranks of ``examples/train.py`` at chosen moments, under torchrun's restarts.

    python -m benchmarks.kill_runs --kills 50 --grid tp=2 [--write]
    python -m benchmarks.kill_runs --hangs 3 --grid dp_shard=2

A small GPT-2 with dropout is trained on gloo ranks twice: undisturbed, and with a kill in every
life of the processes, at a random moment of a random phase on a random rank. What both wrote is
compared to the bit: losses and norms of every step, each time that it ran, and the final weights.
``--write`` keeps the number of kills by phase, and the differences, by grid and seed.
``--hangs`` makes a rank sleep instead, and shows the others' messages and the time until then.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, multiprocessing
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import GPT2Config

import sp_compiler
from examples.processes import grid
from examples.train import Checkpoints, Trainer, parsed, train

_STEP = ("norm", "optimizer", "save", "publish", "evaluate")
PHASES = ("start", "compile", "forward", "backward", *_STEP)
STAGES_PHASES = ("start", "compile", "step", *_STEP)  # forwards and backwards in turns
_SAVE_EVERY = 2
_LONGEST_S = 0.05  # about what a phase of the small model takes
_START_S = 3.0
RESULTS = Path(__file__).parent / "results" / "kill_runs.json"


@dataclass(frozen=True)
class Disturbance:
    """Failure of one rank in one life of the processes.

    Attributes:
        phase: of a step, or the start.
        occurrence: of the phase in this life, from 1.
        delay_s: behind the beginning of the phase.
        rank: that it happens to.
        hangs: sleep instead of being killed.
    """

    phase: str
    occurrence: int
    delay_s: float
    rank: int
    hangs: bool = False


def drawn(count: int, phases: Sequence[str], num_ranks: int, seed: int) -> list[Disturbance]:
    """Return ``count`` random kills, one per life."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        phase = source.choice(phases)
        begins = phase in ("start", "compile")
        longest_s = _START_S if begins else _LONGEST_S
        rare = phase in ("save", "publish", "evaluate")
        occurrence = 1 if begins else source.randint(1, 2 if rare else 4)
        delay_s = source.uniform(0.0, longest_s)
        found.append(Disturbance(phase, occurrence, delay_s, source.randrange(num_ranks)))
    return found


class Phases:
    """The phase that this rank is in, in a file that outlives it, and the clock of its end."""

    def __init__(self, folder: Path, disturbance: Disturbance | None) -> None:
        rank = int(os.environ["RANK"])
        self._file = os.open(folder / f"phase_{rank}", os.O_RDWR | os.O_CREAT)
        self._disturbance = disturbance if disturbance and disturbance.rank == rank else None
        self._counts: Counter[str] = Counter()
        self._now = ""

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Be in ``phase``."""
        before = self._now
        self._enter(phase)
        planned = self._disturbance
        self._counts[phase] += 1
        if planned and (planned.phase, planned.occurrence) == (phase, self._counts[phase]):
            # Of the kernel, whose default is to end the process wherever it is; no handler runs.
            signal.signal(signal.SIGALRM, _sleep if planned.hangs else signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(planned.delay_s, 1e-6))
        try:
            yield
        finally:
            self._enter(before)

    def watch(self, owner: Any, attribute: str, phase: str) -> None:
        """Have ``owner.attribute`` run in ``phase``."""
        function: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.of(phase):
                return function(*args, **kwargs)

        setattr(owner, attribute, watched)

    def _enter(self, phase: str) -> None:
        self._now = phase
        os.pwrite(self._file, f"{phase:12}".encode(), 0)


def _sleep(*_: Any) -> None:
    time.sleep(1e6)


def life(folder: str, argv: Sequence[str], disturbances: Sequence[Disturbance]) -> None:
    """One process of the training, from one start to its end."""
    torch.set_num_threads(1)
    path, number = Path(folder), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if number and os.environ["RANK"] == "0":
        ended = disturbances[number - 1]
        phase = (path / f"phase_{ended.rank}").read_text().strip()
        with (path / "lives.jsonl").open("a") as file:
            file.write(json.dumps({"phase": phase or "between", "rank": ended.rank}) + "\n")
    phases = Phases(path, disturbances[number] if number < len(disturbances) else None)
    for owner, attribute, phase in (
        (dist, "init_process_group", "start"),
        (Trainer, "__init__", "compile"),
        (Trainer, "_loss", "forward"),
        (Tensor, "backward", "backward"),
        (Trainer, "_pipelined", "step"),
        (sp_compiler, "clip_grad_norm_", "norm"),
        (torch.optim.AdamW, "step", "optimizer"),
        (Checkpoints, "save", "publish"),  # what is not the saving itself
        (dcp, "save", "save"),
        (Trainer, "evaluate", "evaluate"),
    ):
        phases.watch(owner, attribute, phase)
    args = parsed(argv)
    try:
        with grid(args) as (mesh, places):
            train(args, mesh, places)
    except Exception:
        # As in a separate process, where nothing catches it.
        sys.excepthook(*sys.exc_info())
        raise


@dataclass
class Runs:
    """Runs of the training in one folder, each with disturbances of its own.

    Args:
        folder: for models, texts, checkpoints and logs.
        axes: sizes of the grid by the name of the axis, such as ``{"dp_shard": 2}``.
        steps: of a run.
        rank_timeout_s: how long a rank waits for another one; ranks compile within it.
    """

    folder: Path
    axes: dict[str, int]
    steps: int
    rank_timeout_s: float = 60.0
    num_ranks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_ranks = 1
        for size in self.axes.values():
            self.num_ranks *= size
        config = GPT2Config(
            vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        config.architectures = ["GPT2LMHeadModel"]
        self.folder.mkdir(parents=True, exist_ok=True)
        config.to_json_file(self.folder / "config.json")
        self.folder.joinpath("text.txt").write_text(
            "all work and no play makes jack a dull boy\n" * 100
        )

    def run(
        self, name: str, disturbances: Sequence[Disturbance] = (), restarts: int | None = None
    ) -> None:
        """Train to the end, as often started again as there are disturbances.

        Raises:
            ChildFailedError: of torchrun, where that was not often enough.
        """
        folder = self.folder / name
        folder.mkdir()
        argv = [
            *("--model", str(self.folder / "config.json"), "--text", str(self.folder / "text.txt")),
            *("--folder", str(folder), "--sequence-length", "16", "--warmup", "2", "--batch", "2"),
            *("--accumulate", "2", "--lr", "0.01", "--log-every", "1", "--evaluate-every", "3"),
            *("--evaluate-batches", "1", "--save-every", str(_SAVE_EVERY)),
            *("--steps", str(self.steps), "--rank-timeout", str(self.rank_timeout_s)),
        ]
        for axis, size in self.axes.items():
            argv += [f"--{axis.replace('_', '-')}", str(size)]
        # Torchrun's own agent; ranks are forks of a process that has imported everything.
        multiprocessing.set_forkserver_preload(["benchmarks.kill_runs", "tests.helpers.warm"])
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=len(disturbances) if restarts is None else restarts,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(str(folder / "logs"), Std.ALL),
            shutdown_timeout=3,
        )
        elastic_launch(config, life)(str(folder), argv, list(disturbances))

    def differences(self, name: str, other: str) -> list[str]:
        """Return the differences between the two runs, compared bit for bit."""
        found = []
        truth = {(r["step"], key): r[key] for r in self._records(other) for key in _compared(r)}
        seen: set[tuple[int, str]] = set()
        last = 0
        for record in self._records(name):
            step = record["step"]
            if step < last - _SAVE_EVERY:
                found.append(f"step {step} again behind step {last}")
            last = max(last, step)
            for key in _compared(record):
                seen.add((step, key))
                if record[key] != truth[step, key]:
                    found.append(f"{key} of step {step}: {record[key]} and {truth[step, key]}")
        found += [f"{key} of step {step} is missing" for step, key in truth.keys() - seen]
        files = [self.folder / each / "model" / "model.safetensors" for each in (name, other)]
        first, second = (load_file(file) for file in files)
        found += [f"weight {key}" for key in second if not torch.equal(first[key], second[key])]
        return found

    def phases(self, name: str) -> Counter[str]:
        """Return in which phases the lives of a run ended."""
        file = self.folder / name / "lives.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter(json.loads(line)["phase"] for line in lines)

    def said(self, name: str) -> list[str]:
        """Return the last two lines that each rank wrote in its last life."""
        lines = []
        for file in sorted((self.folder / name / "logs").rglob("stderr.log")):
            text = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
            lines += [f"    on rank {file.parent.name}: {line}" for line in text[-2:]]
        return lines

    def _records(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _compared(record: dict[str, Any]) -> list[str]:
    return [key for key in ("loss", "norm", "lr", "evaluation_loss") if key in record]


def keep(run: str, ended: Mapping[str, int], differences: Sequence[str], file: Path) -> None:
    """Store what a run showed beside what others did."""
    known = json.loads(file.read_text()) if file.exists() else {}
    known[run] = {"kills": dict(ended), "differences": list(differences)}
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Print what happened, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--hangs", type=int, default=0)
    parser.add_argument("--grid", nargs="+", default=["tp=2"], help="such as dp_shard=2 tp=2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-timeout", type=float, default=60.0, help="s, ranks compile in it")
    parser.add_argument("--write", action="store_true", help="keep the kills, a tracked file")
    args = parser.parse_args()
    axes = {name: int(size) for name, size in (axis.split("=") for axis in args.grid)}
    phases = STAGES_PHASES if axes.get("pp", 1) > 1 else PHASES
    with tempfile.TemporaryDirectory() as folder:
        # A life gets on by two or three steps.
        runs = Runs(Path(folder), axes, 3 * max(args.kills, 3), args.rank_timeout)
        if args.kills:
            runs.run("undisturbed")
            runs.run("killed", drawn(args.kills, phases, runs.num_ranks, args.seed))
            differences = runs.differences("killed", "undisturbed")
            ended = runs.phases("killed")
            print(
                f"{args.grid}: {ended.total()} kills {dict(ended)}, {len(differences)} differences"
            )
            print("\n".join(differences[:20]))
            if args.write:
                keep(f"{' '.join(args.grid)}, seed {args.seed}", ended, differences, RESULTS)
        for number, each in enumerate(drawn(args.hangs, phases, runs.num_ranks, args.seed)):
            hang = Disturbance(each.phase, each.occurrence, each.delay_s, each.rank, hangs=True)
            start = time.monotonic()
            with contextlib.suppress(ChildFailedError):
                runs.run(f"hung_{number}", [hang], restarts=0)
            print(f"rank {hang.rank} hangs in {hang.phase}: {time.monotonic() - start:.0f} s")
            print("\n".join(runs.said(f"hung_{number}")))


if __name__ == "__main__":
    main()
