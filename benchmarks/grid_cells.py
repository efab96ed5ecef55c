"""Ten steps of AdamW on every grid of 2, 4 and 8 processes with every schedule, and on one device.

    python -m benchmarks.grid_cells [--ranks 2 4 8] [--models llama ...] [--minutes 30] [--write]
    python -m benchmarks.grid_cells --table

A cell is a model on a grid with a schedule: gloo processes in float64, each part of the data with
batches of its own, gradients clipped. Losses, norms and parameters are compared with those of the
same steps on one device.

All ranks of many cells run the same program. So this process compiles each program once, and trains
on one device once for all cells with the same expected results. The ranks of a cell are forks of
this process with their own groups. If a rank needs a program that does not exist yet, it ends, and
is forked again once the program is compiled. Results are stored in ``--folder``, or with
``--write`` in the repository; a later run does the cells that are missing or have failed.
``--table`` prints the stored results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from benchmarks.grid_models import MODELS, Training
from benchmarks.performance import markdown_table
from sp_compiler.compiler import compile_captured
from sp_compiler.ir.captured import Captured
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.runner import PassRunner, running_passes
from sp_compiler.pipeline_parallel.schedules import SCHEDULES, schedule_of
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.trace.export import capture
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks

RESULTS = Path(__file__).parent / "results" / "grid_cells.json"
AXES = ("dp_replicate", "dp_shard", "pp", "tp")
STEPS = 10


@dataclass(frozen=True)
class Cell:
    """A model on a grid.

    Attributes:
        model: of :data:`benchmarks.grid_models.MODELS`.
        sizes: of :data:`AXES`.
        schedule: of the stages; "" without stages.
    """

    model: str
    sizes: tuple[int, ...]
    schedule: str

    @property
    def training(self) -> Training:
        pp = self.sizes[AXES.index("pp")]
        microbatches = 2 * pp  # what the schedule with the most demands asks for
        layers = 2
        if self.schedule:
            layers = max(2, pp * schedule_of(self.schedule, None, pp, microbatches)[1])
        return Training(self.model, layers, self.sizes[0] * self.sizes[1], microbatches)

    @property
    def grid(self) -> str:
        named = zip(AXES, self.sizes, strict=True)
        return " x ".join(f"{name} {size}" for name, size in named if size > 1)


def cells(num_ranks: int, models: Sequence[str]) -> Iterator[Cell]:
    """Every cell of ``num_ranks`` processes, those with stages first."""
    powers = [1 << power for power in range(num_ranks.bit_length())]
    found = [
        sizes
        for sizes in itertools.product(powers, repeat=len(AXES))
        if torch.tensor(sizes).prod() == num_ranks
    ]
    for sizes in sorted(found, key=lambda sizes: sizes[2] == 1):
        for schedule in SCHEDULES if sizes[2] > 1 else ("",):
            for model in models:
                yield Cell(model, sizes, schedule)


@functools.cache
def _captured(model: str, layers: int) -> tuple[str, Captured]:
    """Name of the class and its graph for a microbatch."""
    training = Training(model, layers, 1, 1)
    module = training.build()
    return type(module).__name__, capture(module, (), training.microbatch())


class Programs:
    """Compiled programs by model, number of layers and options, for microbatches of one size."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], PlannedProgram] = {}

    def add(self, training: Training, options: CompileOptions) -> None:
        """Compile the program that ranks asked for."""
        with grids.lifted(), running_passes(open_dims=False):
            name, captured = _captured(training.model, training.layers)
            compiled = compile_captured(
                captured.copy(), options, name, {}, "nothing", PassRunner(keep_graphs=False)
            )
        self._known[self._key(training, options)] = compiled

    def taken(self, training: Training, missing: list[CompileOptions]) -> Any:
        """Context in which programs come from here; one that is ``missing`` is an error."""
        shapes = {name: value.shape for name, value in training.microbatch().items()}

        def take(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            options: CompileOptions,
            *,
            fixed: Any,
            open_dims: bool,
            **_kept: Any,
        ) -> PlannedProgram:
            assert shapes == {name: value.shape for name, value in kwargs.items()}
            assert (args, fixed, open_dims) == ((), None, False)
            key = self._key(training, options)
            if key not in self._known:
                missing.append(options)
            return self._known[key]

        return mock.patch("sp_compiler.api.build", take)

    @staticmethod
    def _key(training: Training, options: CompileOptions) -> tuple[str, int, str]:
        return training.model, training.layers, repr(options)


@dataclass(frozen=True)
class Truth:
    """Training on one device.

    Attributes:
        course: loss and norm of every step.
        state: the final parameters.
    """

    course: list[tuple[float, float]]
    state: dict[str, Tensor]


@functools.cache
def _truth(training: Training) -> Truth:
    with grids.lifted():
        follower = grids.truth_of(
            grids.Case(training.build, lambda _: [], "dropout" in training.model)
        )
        course = []
        for step in range(STEPS):
            torch.manual_seed(step)
            batch, parts = training.batch(step), training.parts
            course.append(grids.truth_step(follower, batch, parts, training.microbatches, 2.0))
    return Truth(course, follower.module.state_dict())


def measured(cell: Cell, truth: Truth) -> dict[str, float]:
    """The largest differences of losses, norms (relative) and parameters from one device's."""
    mesh = init_device_mesh("cpu", cell.sizes, mesh_dim_names=AXES)
    part, parts = sp_compiler.data_shard(mesh)
    training = cell.training
    example = grids.split(training.batch(0), parts)[part]
    if cell.schedule:
        module: Any = sp_compiler.pipeline(
            training.build(),
            mesh=mesh,
            example_inputs=((), example),
            microbatches=training.microbatches,
            schedule=cell.schedule,
        )
    else:
        micro = grids.split(example, training.microbatches)[0]
        module = sp_compiler.compile(training.build(), mesh=mesh, example_inputs=((), micro))
    one = grids.Follower.of(module)
    worst = {"losses": 0.0, "norms": 0.0}
    for step, theirs in enumerate(truth.course):
        torch.manual_seed(step)
        batch = training.batch(step)
        if cell.schedule:
            loss = module.step(**grids.split(batch, parts)[part])
            dist.all_reduce(loss)
            norm = sp_compiler.clip_grad_norm_(module, grids.MAX_NORM, 2.0)
            ours = float(loss / dist.get_world_size()), one.step(norm)
        else:
            ours = grids.grid_step(one, batch, mesh, training.microbatches, 2.0)
        for kind, first, second in zip(worst, ours, theirs, strict=True):
            worst[kind] = max(worst[kind], abs(first - second) / abs(second))
    worst["parameters"] = max(
        (grids.whole(value) - truth.state[name]).abs().max().item()
        for name, value in module.state_dict().items()
    )
    return worst


def _on_a_rank(
    cell: Cell, programs: Programs, truth: Truth
) -> tuple[dict[str, Any], list[CompileOptions]]:
    """Largest errors of this rank, or why there are none; options of a program that is missing."""
    torch.set_num_threads(1)
    missing: list[CompileOptions] = []
    outcome: dict[str, Any]
    with grids.lifted(), programs.taken(cell.training, missing):
        try:
            outcome = measured(cell, truth)
        except sp_compiler.UnsupportedError as error:
            outcome = {"refused": str(error)}
        except Exception as error:  # a cell that fails is listed, whatever is wrong
            outcome = {"failed": f"{type(error).__name__}: {error}"}
    return outcome, missing


def outcome_of(cell: Cell, num_ranks: int, programs: Programs) -> dict[str, Any]:
    """The largest errors of all ranks, or why there are none."""
    truth = _truth(cell.training)
    while True:
        try:
            results = run_on_ranks(
                num_ranks, _on_a_rank, cell, programs, truth, start_method="fork"
            )
        except (
            multiprocessing.ProcessRaisedException,
            multiprocessing.ProcessExitedException,
        ) as error:
            return {"failed": str(error).strip().splitlines()[-1]}
        missing = {repr(options): options for _, found in results for options in found}
        if not missing:
            break
        for options in missing.values():
            programs.add(cell.training, options)
    outcomes = [outcome for outcome, _ in results]
    for kind in ("failed", "refused"):
        texts = [each[kind] for each in outcomes if kind in each]
        if texts:
            return {kind: texts[0]}
    return {kind: max(each[kind] for each in outcomes) for kind in outcomes[0]}


def run(num_ranks: int, models: Sequence[str], results: Path, end: float) -> None:
    """Run the cells of ``num_ranks`` processes that have no numbers yet, until ``end``."""
    programs = Programs()
    known = _read(results)
    for cell in cells(num_ranks, models):
        if "failed" not in known.get(_key(cell), {"failed": ""}):
            continue
        if time.time() > end:
            return
        begin = time.monotonic()
        outcome = outcome_of(cell, num_ranks, programs)
        _write(results, cell, outcome)
        took_s = time.monotonic() - begin
        print(f"{cell.grid} {cell.schedule} {cell.model}: {outcome} in {took_s:.1f} s", flush=True)


def _key(cell: Cell) -> str:
    return json.dumps(asdict(cell))


def _read(results: Path) -> dict[str, dict[str, Any]]:
    return json.loads(results.read_text()) if results.exists() else {}


def _write(results: Path, cell: Cell, outcome: Mapping[str, Any]) -> None:
    known = _read(results)
    known[_key(cell)] = dict(outcome)
    results.write_text(json.dumps(known, indent=1) + "\n")


def table(results: Path) -> str:
    """Stored measurements: per model the largest of the three differences, by grid and schedule."""
    known, lines, reasons = _read(results), [], []
    for model in MODELS:
        rows = []
        for num_ranks in (2, 4, 8):
            by_grid: dict[str, dict[str, str]] = {}
            for cell in cells(num_ranks, [model]):
                outcome = known.get(_key(cell))
                if outcome is None:
                    continue
                reason = outcome.get("refused") or outcome.get("failed")
                if reason and reason not in reasons:
                    reasons.append(reason)
                word = "refused" if "refused" in outcome else "failed"
                by_grid.setdefault(cell.grid, {})[cell.schedule] = (
                    f"{word} ({reasons.index(reason) + 1})"
                    if reason
                    else f"{max(outcome.values()):.0e}"
                )
            rows += [
                [grid, *(found.get(name, "") for name in ("", *SCHEDULES))]
                for grid, found in by_grid.items()
            ]
        if rows:
            lines += [f"### {model}", "", markdown_table(["grid", "no stages", *SCHEDULES], rows)]
    return "\n".join([*lines, *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))])


def main() -> None:
    """Run cells, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8))
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="the begin of a name")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="keep cells in the repository")
    parser.add_argument("--folder", type=Path, default=Path("grid_cells"), help="of this run")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    results = RESULTS if asked.write else asked.folder / RESULTS.name
    if asked.table:
        print(table(results if results.exists() else RESULTS))
        return
    end = time.time() + 60 * asked.minutes
    asked.folder.mkdir(parents=True, exist_ok=True)
    begins = tuple(name.lower() for name in asked.models)
    models = [name for name in MODELS if name.lower().startswith(begins)]
    for num_ranks in asked.ranks:
        run(num_ranks, models, results, end)


if __name__ == "__main__":
    main()
