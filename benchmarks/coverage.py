"""Compile every architecture of the tests, compare it with itself on one device, write it down.

``python -m benchmarks.coverage [--fast] [names...]`` measures the named architectures, or all,
keeps what it finds in ``tests/coverage_floors.json``, which the tests compare with, and renders all
that is kept there as ``docs/coverage.md``. ``--fast`` leaves out the kept bytes, which need another
compilation. It needs no accelerator: the ranks are simulated, in float64.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.shares import flops_share, kept_share, parameter_share
from sp_compiler.config import CompileOptions
from sp_compiler.plan import BlockPlan, make_plan
from tests import architectures, parity

_ROOT = Path(__file__).parents[1]
FLOORS = _ROOT / "tests" / "coverage_floors.json"
PAGE = _ROOT / "docs" / "coverage.md"
_KINDS = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
_HEAD = """# Coverage

Written by `python -m benchmarks.coverage` from real runs; not edited by hand.

Every architecture in two tiny configurations with two layers, in float64 with the model's own casts
lifted, on simulated ranks, sequence parallel on, `recompute="selective"`, against the same captured
graph on one device. *dividing*: 8 heads, 4 or 8 key/value heads, vocabulary 128, width 64.
*awkward*: 4 heads, 2 key/value heads, vocabulary 131, width 48, 33 tokens. 2, 4 and 8 ranks take
turns.

Errors are relative to the largest number of the output or gradient. Shares are of the forward's
matrix-product FLOPs, of the bytes of parameters with two dims or more, and of the bytes kept for
backward, that are sharded. Collectives are those of the block called most often, forward +
backward: `G` all-gather, `S` reduce-scatter, `R` all-reduce. Compile time is CPU time, without
capture.
"""


def measure(name: str, configuration: str, *, kept: bool = False) -> dict[str, Any]:
    """Plain data about one architecture in one configuration.

    Args:
        name: one of ``tests.architectures.names()``.
        configuration: "dividing" or "awkward".
        kept: measure the share of kept bytes too, which compiles for one rank as well.
    """
    size, ranks = architectures.setting(name, configuration)
    case = architectures.case(name, size)
    start = time.process_time()
    compiled = parity.compiled(case, tp=ranks)
    seconds = time.process_time() - start
    step = parity.simulate(case, compiled)
    plan = make_plan(compiled, CompileOptions(tp=ranks))
    record = {
        "tp": ranks,
        "output_error": parity.output_error(step, case),
        "gradient_error": parity.gradient_error(step.grads, case.grads),
        "flops": _down(flops_share(case.program, compiled)),
        "parameters": _down(parameter_share(compiled)),
        "collectives": _collectives(max(plan.blocks, key=lambda block: block.num_calls)),
        "fallbacks": sorted({*map(_subject, plan.fallbacks), *map(" ".join, compiled.whole)}),
        "reasons": list(plan.fallbacks),
        "seconds": round(seconds, 1),
        "sharded_parameters": [
            key for key, value in compiled.param_placements.items() if value.is_sharded
        ],
    }
    if kept:
        record["kept"] = _down(kept_share(compiled, parity.compiled(case, tp=1)))
    return record


def _down(share: float) -> float:
    return math.floor(share * 1000 + 1e-6) / 1000


def _subject(fallback: str) -> str:
    """What a fallback is about, without sizes and reasons."""
    return re.sub(r" (and \d+ more like it )?(is replicated|runs whole).*", "", fallback)


def _collectives(block: BlockPlan) -> str:
    sides = (
        "".join(f"{c.count}{_KINDS[c.kind]}" for c in s) for s in (block.forward, block.backward)
    )
    return " + ".join(side or "0" for side in sides)


def page(floors: dict[str, dict[str, Any]]) -> str:
    """The text of ``docs/coverage.md``."""
    notes = [
        f"- **{name}, {configuration}**: {reason}" for name, configuration, reason in _notes(floors)
    ]
    parts = [_HEAD]
    for configuration in architectures.CONFIGURATIONS:
        parts.append(f"## {configuration.capitalize()} sizes\n\n{_table(floors, configuration)}\n")
    return "\n".join([*parts, "## What runs whole, and why\n", *notes, ""])


def _table(floors: dict[str, dict[str, Any]], configuration: str) -> str:
    rows = [
        "| architecture | ranks | output error | gradient error | FLOPs | parameters | kept | "
        "collectives per block | whole | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in architectures.names():
        r = floors[name][configuration]
        rows.append(
            f"| {name} | {r['tp']} | {r['output_error']:.0e} | {r['gradient_error']:.0e} | "
            f"{r['flops']:.1%} | {r['parameters']:.1%} | {_kept(r)} | {r['collectives']} | "
            f"{len(r['fallbacks'])} | {r['seconds']:.1f} |"
        )
    return "\n".join(rows)


def _kept(record: dict[str, Any]) -> str:
    return f"{record['kept']:.1%}" if "kept" in record else "not measured"


def _notes(floors: dict[str, dict[str, Any]]) -> Iterable[tuple[str, str, str]]:
    for name in architectures.names():
        for configuration in architectures.CONFIGURATIONS:
            for reason in floors[name][configuration]["reasons"]:
                yield name, configuration, reason


def load() -> dict[str, dict[str, Any]]:
    """What was kept of earlier runs, by architecture and configuration."""
    return json.loads(FLOORS.read_text()) if FLOORS.exists() else {}


def main(arguments: list[str]) -> None:
    """Measure the named architectures, or all, and write both files."""
    names = [argument for argument in arguments if argument != "--fast"]
    kept = "--fast" not in arguments
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names or architectures.names():
        for configuration in architectures.CONFIGURATIONS:
            found = measure(name, configuration, kept=kept)
            del found["sharded_parameters"]
            floors = load()
            floors.setdefault(name, {})[configuration] = found
            FLOORS.write_text(json.dumps(floors, indent=1, sort_keys=True) + "\n")
            print(f"{name} {configuration}: {found}", flush=True)
    floors = load()
    if set(floors) >= set(architectures.names()):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(floors))


if __name__ == "__main__":
    main(sys.argv[1:])
