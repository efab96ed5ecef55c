"""Compile every architecture of the tests, compare it with itself on one device, write it down.

``python -m benchmarks.coverage [--write] [--turns] [--missing] [names...]`` measures the named
architectures, or all, for 2, 4 and 8 ranks. With ``--write`` it stores the results in
``tests/end_to_end/coverage_floors.json``, with which the tests compare, and renders that file as
``docs/coverage.md``.
``--turns`` measures only the number of ranks whose turn it is, which is what the tests run;
``--missing`` only what was not measured in full. It needs no accelerator: the ranks are
simulated, in float64.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.shares import flops_share, kept_bytes, kept_share, parameter_share
from sp_compiler.options import CompileOptions
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.data import BlockPlan
from sp_compiler.planning.plan import Plan
from tests.helpers import parity
from tests.models import architectures

_ROOT = Path(__file__).parents[1]
FLOORS = _ROOT / "tests" / "end_to_end" / "coverage_floors.json"
PAGE = _ROOT / "docs" / "coverage.md"
Floors = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Measurements, by architecture, configuration and number of ranks."""
_KINDS = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
_HEAD = """# Coverage

Written by `python -m benchmarks.coverage --write` from real runs; not edited by hand.

Which architectures does sp_compiler shard, and are their numbers right? Each architecture runs in
two tiny configurations with two layers, in float64 with the model's own casts lifted, on 2, 4 and 8
simulated ranks with sequence parallelism and `recompute="selective"`, against the same captured
graph on one device. *dividing*: 8 heads, 4 key/value heads (8 for 8 ranks), vocabulary 128, width
64. *awkward*: 4 heads, 2 key/value heads, vocabulary 131, width 48, 33 tokens. The scan of
qwen3_next runs in chunks of 16 tokens.

- *output error*, *gradient error*: relative to the largest number of the output or gradient; the
  largest for all numbers of ranks.
- *FLOPs*, *parameters*, *kept*: the sharded share of the forward's matrix-product FLOPs, of the
  bytes of parameters with two or more dims, and of the bytes saved for backward.
- *collectives per block*: those of the layer with the most matrix-product FLOPs, forward +
  backward: `G` all-gather, `S` reduce-scatter, `R` all-reduce.
- *replicated*: the number of parameters and operators that every rank stores or runs in full.
- *compile s*: CPU seconds to compile, without capture.

Several values in a cell belong to the numbers of ranks in the second column; a single value is the
same for all.
"""
_REASONS = """## What is replicated, and why

Parameters that every rank stores in full, and operators that every rank runs in full, with n in
place of numbers. The plan of a model shows where they are.
"""


def measure(case: parity.Case, ranks: int, *, kept: float | None = None) -> dict[str, Any]:
    """Plain data about one captured architecture on some ranks.

    Args:
        case: see ``tests.models.architectures.case``.
        ranks: how many.
        kept: bytes that one rank alone keeps for backward, see :func:`kept_bytes`; ``None``: the
            share that is sharded of them is not measured.
    """
    start = time.process_time()
    compiled = parity.compiled(case, tp=ranks)
    seconds = time.process_time() - start
    step = parity.simulate(case, compiled)
    plan = make_plan(compiled, CompileOptions(tp=ranks))
    record = {
        "output_error": parity.output_error(step, case),
        "gradient_error": parity.gradient_error(step.grads, case.grads),
        "flops": _down(flops_share(case.program, compiled)),
        "parameters": _down(parameter_share(compiled)),
        "collectives": _collectives(_main_block(plan)),
        "fallbacks": sorted({*map(_subject, plan.fallbacks), *map(" ".join, compiled.replicated)}),
        "reasons": sorted({_reason(line) for line in _replicated(plan)}),
        "seconds": round(seconds, 1),
        "sharded_parameters": [
            key for key, value in compiled.param_placements.items() if value.is_sharded
        ],
    }
    if kept is not None:
        record["kept"] = _down(kept_share(compiled, kept))
    return record


def _down(share: float) -> float:
    return math.floor(share * 1000 + 1e-6) / 1000


def _replicated(plan: Plan) -> list[str]:
    return [*plan.fallbacks, *(note for note in plan.notes if "runs replicated" in note)]


def _subject(fallback: str) -> str:
    """The subject of a fallback, without sizes and reasons."""
    return re.sub(r" (and \d+ more like it )?(is|runs) replicated.*", "", fallback)


def _reason(fallback: str) -> str:
    """The kind of value that is replicated and why: without places, with n for every number."""
    what, _, why = fallback.partition(": ")
    kind = what.split()[0].removesuffix(".default")
    why = re.sub(r"(could not be proven|time than it saves memory|is not worthwhile).*", r"\1", why)
    why = why.replace(f"for {what.split()[0]}", "for it")
    why = re.sub(r"\([\dx]+\) | \(x \d+\)", "", why)
    why = re.sub(r"\([\d, ]+\) x \([\d, ]+\)", "it", why)
    return f"{kind}: {re.sub(r'[0-9]+', 'n', why)}"


def _main_block(plan: Plan) -> BlockPlan:
    """The layer with the most matrix products; code outside of layers has no path."""
    layers = [block for block in plan.blocks if any(block.paths)] or plan.blocks
    return max(layers, key=lambda block: block.work.model_flops)


def _collectives(block: BlockPlan) -> str:
    sides = (
        "".join(f"{c.count}{_KINDS[c.kind]}" for c in s) for s in (block.forward, block.backward)
    )
    return " + ".join(side or "0" for side in sides)


def page(floors: Floors) -> str:
    """The text of ``docs/coverage.md``."""
    parts = [_HEAD]
    for configuration in architectures.CONFIGURATIONS:
        parts.append(f"## {configuration.capitalize()} sizes\n\n{_table(floors, configuration)}\n")
    return "\n".join([*parts, _REASONS, *_reasons(floors), ""])


def _table(floors: Floors, configuration: str) -> str:
    rows = [
        "| architecture | ranks | output error | gradient error | FLOPs % | parameters % "
        "| kept % | collectives per block | replicated | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in _measured(floors, configuration):
        records = [found[ranks] for ranks in sorted(found, key=int)]
        cells = [
            name,
            ", ".join(sorted(found, key=int)),
            *(f"{max(r[key] for r in records):.0e}" for key in ("output_error", "gradient_error")),
            *(_each(map(_percent(key), records)) for key in ("flops", "parameters", "kept")),
            _each(r["collectives"] for r in records),
            _each(str(len(r["fallbacks"])) for r in records),
            f"{max(r['seconds'] for r in records):.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _measured(floors: Floors, configuration: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each architecture with its records; a new one may have none yet."""
    for name in architectures.names():
        if found := floors.get(name, {}).get(configuration):
            yield name, found


def _percent(key: str) -> Any:
    return lambda record: f"{100 * record[key]:.1f}" if key in record else "not measured"


def _each(texts: Iterable[str]) -> str:
    found = list(texts)
    return found[0] if len(set(found)) == 1 else ", ".join(found)


def _reasons(floors: Floors) -> Iterable[str]:
    """A line for each reason, with the architectures it holds for."""
    lines: dict[str, dict[str, dict[str, None]]] = {}
    for configuration in architectures.CONFIGURATIONS:
        for name, by_ranks in _measured(floors, configuration):
            for record in by_ranks.values():
                for reason in record["reasons"]:
                    found = lines.setdefault(reason, {}).setdefault(configuration, {})
                    found[name] = None
    for reason in sorted(lines):
        where = (
            f"*{configuration}* {', '.join(names)}"
            for configuration, names in lines[reason].items()
        )
        yield f"- **{reason}**: {'; '.join(where)}"


def load() -> Floors:
    """Stored results of earlier runs."""
    return json.loads(FLOORS.read_text()) if FLOORS.exists() else {}


def _ranks(name: str, configuration: str, flags: set[str]) -> list[int]:
    """The numbers of ranks to measure."""
    known = load().get(name, {}).get(configuration, {})
    measured = [int(ranks) for ranks, record in known.items() if "kept" in record]
    turn = architectures.turn(name, configuration)
    wanted = [turn] if "--turns" in flags else architectures.RANKS
    return [ranks for ranks in wanted if "--missing" not in flags or ranks not in measured]


def _measure_all(name: str, configuration: str, ranks: list[int], *, write: bool) -> None:
    cases: dict[architectures.Size, tuple[parity.Case, float]] = {}
    for count in ranks:
        size = architectures.size(configuration, count)
        if size not in cases:
            case = architectures.case(name, size)
            cases[size] = case, kept_bytes(parity.compiled(case, tp=1))
        case, kept = cases[size]
        found = measure(case, count, kept=kept)
        del found["sharded_parameters"]
        if write:
            _keep(name, configuration, count, found)
        print(f"{name} {configuration} {count}: {found}", flush=True)


def _keep(name: str, configuration: str, ranks: int, record: dict[str, Any]) -> None:
    """Write the record and the page that shows it: a test compares the two."""
    floors = load()
    floors.setdefault(name, {}).setdefault(configuration, {})[str(ranks)] = record
    FLOORS.write_text(json.dumps(floors, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(floors))


def main(arguments: list[str]) -> None:
    """Measure the named architectures, or all."""
    flags = {argument for argument in arguments if argument.startswith("--")}
    names = [argument for argument in arguments if argument not in flags]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names or architectures.names():
        for configuration in architectures.CONFIGURATIONS:
            ranks = _ranks(name, configuration, flags)
            _measure_all(name, configuration, ranks, write="--write" in flags)


if __name__ == "__main__":
    main(sys.argv[1:])
