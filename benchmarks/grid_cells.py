"""Ten steps of AdamW on every grid of 2, 4 and 8 processes, with every schedule, beside one device.

    python -m benchmarks.grid_cells [--ranks 2 4 8] [--models llama ...] [--minutes 30] [--write]
    python -m benchmarks.grid_cells --table

A cell is a model on a grid with a schedule: gloo processes in float64, each part of the data with
batches of its own, gradients clipped. Losses, norms and parameters are compared with those of the
same steps on one device. What was measured is kept in ``--folder``, or with ``--write`` in the
results of the repository, and a later run does the cells that are missing there and those that
failed; ``--table`` prints what there is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from benchmarks.performance import markdown_table
from sp_compiler.pipeline_parallel.schedules import SCHEDULES, schedule_of
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

RESULTS = Path(__file__).parent / "results" / "grid_cells.json"
AXES = ("dp_replicate", "dp_shard", "pp", "tp")
STEPS, SEQUENCE, SAMPLES = 10, 8, 2  # samples of a microbatch
WITHIN = 1e-9
# Every mesh makes process groups that live as long as the process.
_CELLS_PER_START = 8
_COMMON: dict[str, Any] = {
    "vocab_size": 131,  # which no number of ranks divides
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def _gpt2(layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=131, n_positions=32, n_embd=32, n_layer=layers, n_head=8, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(layers: int) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, **_COMMON)
    )


def _mixtral(layers: int) -> nn.Module:
    config = transformers.MixtralConfig(num_hidden_layers=layers, num_local_experts=4, **_COMMON)
    model: Any = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # eager has no other in float64
    return model


def _t5(layers: int) -> nn.Module:
    per_stack = max(2, (layers + 1) // 2)
    config = transformers.T5Config(
        vocab_size=131, d_model=32, d_kv=4, d_ff=48, num_heads=8, num_layers=per_stack,
        num_decoder_layers=per_stack, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "GPT-2, tied, dropout 0.1": _gpt2,
    "Llama, 4 of 8 kv heads": _llama,
    "Mixtral, 4 experts": _mixtral,
    "T5": _t5,
}


@dataclass(frozen=True)
class Cell:
    """A model on a grid.

    Attributes:
        model: of :data:`MODELS`.
        sizes: of :data:`AXES`.
        schedule: of the stages; "" without stages.
    """

    model: str
    sizes: tuple[int, ...]
    schedule: str

    @property
    def pp(self) -> int:
        return self.sizes[AXES.index("pp")]

    @property
    def parts(self) -> int:
        return self.sizes[0] * self.sizes[1]

    @property
    def microbatches(self) -> int:
        return 2 * self.pp  # what the schedule with the most demands asks for

    @property
    def layers(self) -> int:
        if not self.schedule:
            return 2
        return max(2, self.pp * schedule_of(self.schedule, None, self.pp, self.microbatches)[1])

    @property
    def grid(self) -> str:
        named = zip(AXES, self.sizes, strict=True)
        return " x ".join(f"{name} {size}" for name, size in named if size > 1)

    def build(self) -> nn.Module:
        """The model in float64."""
        model = MODELS[self.model](self.layers)
        zoo.randomise(model, 0)
        return model.double().train()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Of all parts of the data."""
        generator = torch.Generator().manual_seed(step)
        rows = SAMPLES * self.microbatches * self.parts
        ids, labels = (
            torch.randint(0, 131, (rows, SEQUENCE), generator=generator) for _ in range(2)
        )
        return {"input_ids": ids, "labels": labels}


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


def _truth(cell: Cell, folder: Path) -> dict[str, Any]:
    """Losses, norms and final parameters of one device, which cells of the same numbers share."""
    numbers = (list(MODELS).index(cell.model), cell.layers, cell.parts, cell.microbatches)
    file = folder / ("_".join(map(str, numbers)) + ".pt")
    if dist.get_rank() == 0 and not file.exists():
        has_dropout = "dropout" in cell.model
        chosen = grids.Case(cell.build, lambda _: [], has_dropout)
        follower, course = grids.truth_of(chosen), []
        for step in range(STEPS):
            torch.manual_seed(step)
            batch = cell.batch(step)
            course.append(grids.truth_step(follower, batch, cell.parts, cell.microbatches, 2.0))
        torch.save({"course": course, "state": follower.module.state_dict()}, file)
    dist.barrier()
    return torch.load(file)


def measured(cell: Cell, folder: Path) -> dict[str, float]:
    """The largest differences of losses, norms (relative) and parameters from one device's."""
    mesh = init_device_mesh("cpu", cell.sizes, mesh_dim_names=AXES)
    part, parts = sp_compiler.data_shard(mesh)
    with grids.lifted():
        truth = _truth(cell, folder)
        example = grids.split(cell.batch(0), parts)[part]
        if cell.schedule:
            module: Any = sp_compiler.pipeline(
                cell.build(),
                mesh=mesh,
                example_inputs=((), example),
                microbatches=cell.microbatches,
                schedule=cell.schedule,
            )
        else:
            micro = grids.split(example, cell.microbatches)[0]
            module = sp_compiler.compile(cell.build(), mesh=mesh, example_inputs=((), micro))
        one = grids.Follower.of(module)
        worst = {"losses": 0.0, "norms": 0.0}
        for step, theirs in enumerate(truth["course"]):
            torch.manual_seed(step)
            batch = cell.batch(step)
            if cell.schedule:
                loss = module.step(**grids.split(batch, parts)[part])
                dist.all_reduce(loss)
                norm = sp_compiler.clip_grad_norm_(module, grids.MAX_NORM, 2.0)
                ours = float(loss / dist.get_world_size()), one.step(norm)
            else:
                ours = grids.grid_step(one, batch, mesh, cell.microbatches, 2.0)
            for kind, first, second in zip(worst, ours, theirs, strict=True):
                worst[kind] = max(worst[kind], abs(first - second) / abs(second))
        worst["parameters"] = max(
            (grids.whole(value) - truth["state"][name]).abs().max().item()
            for name, value in module.state_dict().items()
        )
    return worst


def _outcome(cell: Cell, folder: Path) -> dict[str, Any]:
    """Results of all ranks: the largest errors, or why there are none."""
    outcome: dict[str, Any]
    try:
        outcome = measured(cell, folder)
    except sp_compiler.UnsupportedError as error:
        outcome = {"refused": str(error)}
    except Exception as error:  # a cell that fails is listed, whatever is wrong
        outcome = {"failed": f"{type(error).__name__}: {error}"}
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, outcome)
    for kind in ("failed", "refused"):
        texts = [each[kind] for each in results if kind in each]
        if texts:
            return {kind: texts[0]}
    return {kind: max(each[kind] for each in results) for kind in results[0]}


def _run(todo: Sequence[Cell], folder: Path, results: Path, end: float) -> None:
    """Run cells on this rank's part of a grid; the first rank writes."""
    torch.set_num_threads(1)
    for cell in todo:
        late = torch.tensor(time.time() > end)
        dist.broadcast(late, 0)
        if late:
            return
        begin = time.monotonic()
        outcome = _outcome(cell, folder)
        if dist.get_rank() == 0:
            _write(results, cell, outcome)
            took_s = time.monotonic() - begin
            print(f"{cell.grid} {cell.schedule} {cell.model}: {outcome} in {took_s:.0f} s")
            sys.stdout.flush()
        # A step that failed leaves groups in which messages of it are on their way.
        if "failed" in outcome:
            return


def _key(cell: Cell) -> str:
    return json.dumps(asdict(cell))


def _read(results: Path) -> dict[str, dict[str, Any]]:
    return json.loads(results.read_text()) if results.exists() else {}


def _write(results: Path, cell: Cell, outcome: Mapping[str, Any]) -> None:
    known = _read(results)
    known[_key(cell)] = dict(outcome)
    results.write_text(json.dumps(known, indent=1) + "\n")


def run(num_ranks: int, models: Sequence[str], results: Path, folder: Path, end: float) -> None:
    """Run the cells of ``num_ranks`` processes that have no numbers yet, until ``end``."""
    tried: set[Cell] = set()
    while time.time() < end:
        known = _read(results)
        todo = [
            cell
            for cell in cells(num_ranks, models)
            if cell not in tried and "failed" in known.get(_key(cell), {"failed": ""})
        ][:_CELLS_PER_START]
        if not todo:
            return
        try:
            run_on_ranks(num_ranks, _run, todo, folder, results, end)
        except (
            multiprocessing.ProcessRaisedException,
            multiprocessing.ProcessExitedException,
        ) as e:
            lost = next(cell for cell in todo if _key(cell) not in _read(results))
            _write(results, lost, {"failed": str(e).strip().splitlines()[-1]})
        known = _read(results)
        tried |= {cell for cell in todo if "failed" in known.get(_key(cell), {})}


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
        run(num_ranks, models, results, asked.folder, end)


if __name__ == "__main__":
    main()
