"""Measurements as a page: renders ``benchmarks/results/*.json`` as ``docs/performance.md``.

    python -m benchmarks.performance [--write]

``benchmarks.step_time``, ``compile_time``, ``verify_time``, ``inductor_time`` and ``region_times``
write the files; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
FILES = "step_time", "compile_time", "verify_time", "inductor_time", "region_times"
_HEAD = """# Performance

Written by `python -m benchmarks.performance --write` from `benchmarks/results/`; not edited by
hand.

How fast a step is next to other implementations of the same model, and how long compiling takes.
`make bench WRITE=--write` measures again. The contenders of a table ran in turns in one process
group. A ratio is the median over rounds of sp_compiler's time divided by the contender's in the
same round: below 1, sp_compiler is faster. Compare ratios; the milliseconds depend on the machine.
"""
_RUNS = {
    "tensor-parallel": """Two gloo ranks, a plain GPT of 4 layers, hidden 512, 2 x 512 tokens,
float32. *Megatron style* is hand-written code in `benchmarks/peers/`: plain tensors, explicit
autograd functions, the same collectives and recomputation. *Megatron-Core* is the library, on CPU.
Contenders that shard tokens too (*TP+SP*) are compared with `sequence_parallel=True`, the others
(*TP*) with `False`, so that both communicate the same. With "selective", only sp_compiler
recomputes more than the attention core, and so saves less.""",
    "one-device": 'The same model on one device: `tp=1`, `recompute="none"`, against eager.',
    "overhead": """Hidden 64 and a fake process group, whose collectives send nothing: the CPU time
is mostly Python overhead.""",
    "fsdp": """CPU time of a step on a grid, the sum over four gloo processes; hidden 256, 4 layers,
8 x 128 tokens for each of two parts of the data, `recompute="none"`. *Megatron style + FSDP2* is
the hand-written code with `fully_shard` on its blocks and root. This table and the next one:
`python -m benchmarks.grid_time --write`.""",
    "pipeline": """Four stages, 1F1B, 8 microbatches of 2 x 128 tokens. The others are torch's
`PipelineStage` and `Schedule1F1B` over stages that are cut by hand at the same layers: as they are,
and each compiled by `sp_compiler.compile(tp=1)`, which makes equal stages.""",
    "rank-checks": """Two gloo ranks, with and without the comparisons between ranks in every call
(modes, shapes and options, periodically values): CPU time of the thread that runs the step.""",
}


# The expected difference is half a percent.
_DIGITS = {"rank-checks": ".3"}
_COLUMNS = {
    "model": "model",
    "backend": "backend",
    "region": "part",
    "direction": "direction",
    "setting": "setting",
    "contender": "contender",
    "layers": "layers",
    "cache": "cache",
    "median_ms": "median ms",
    "ratio": "inductor / it",
    "planned_ms": "planned ms",
    "measured_ms": "measured ms",
    "estimate": "planned / measured",
    "saved_mib": "saved MiB",
    "compile": "compile",
    "first_step": "first step",
    "both": "both",
}
_INDUCTOR_RUNS = {
    "one-device": """CPU time of a step with `backend="inductor"`: a plain GPT and a Llama of 4
layers, hidden 512, 2 x 512 tokens, float32, every dropout probability 0.1, `tp=1`,
`recompute="selective"`. The ratio is that of *inductor* to the contender; *saved* is what autograd
keeps for backward, without parameters.""",
    "two-ranks": "The same on two gloo ranks, `tp=2`.",
    "compile": """CPU seconds of a new process, its C++ compilers included, until the first step of
the GPT is done, with an empty cache and with the cache of the previous process: *compile* is
`sp_compiler.compile`, *first step* the additional time of the first step over the next.""",
}
_ESTIMATES = """Time of a call of each part of the same models with 2 layers, as the plan estimates
it for a profile of this machine (`sp_compiler.profile()`), and the shortest measured CPU time,
`tp=1`, `recompute="selective"`. Dropout is one kernel with "inductor"; in
eager code, it takes the time in which the profile draws random numbers. The Prologue (embeddings)
takes a millisecond or two, much of it for pages of new memory, which estimates do not include."""
_TOLERANCE = 0.15


def machine() -> str:
    """Return a description of the machine on which a result is measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (
        f"{device}, {os.cpu_count()} cores, {torch.get_num_threads()} thread per rank, "
        f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    )


def save(path: Path, run: str, rows: Iterable[Mapping[str, Any]], **settings: Any) -> None:
    """Write the rows of one run to ``path``, and keep those of other runs."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[run] = {"machine": machine(), **settings, "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def page(
    step_time: Mapping[str, Any],
    compile_time: Mapping[str, Any],
    verify_time: Mapping[str, Any],
    inductor_time: Mapping[str, Any],
    region_times: Mapping[str, Any],
) -> str:
    """The text of ``docs/performance.md``."""
    parts = [_HEAD, "## Time of a step, forward and backward\n"]
    for name, about in _RUNS.items():
        run = step_time[name]
        digits = _DIGITS.get(name, ".2")
        rows = [
            (r["setting"], r["contender"], f"{r['median_ms']:.1f}", f"{r['ratio']:{digits}f}")
            for r in run["rows"]
        ]
        parts.append(f"{about}\n\n{run['rounds']} rounds on {run['machine']}.\n")
        parts.append(
            markdown_table(("setting", "contender", "median ms", "sp_compiler / it"), rows)
        )
    parts.append("## Time of a compilation\n")
    for run in compile_time.values():
        depths = [f"{depth} layers" for depth in run["layers"]]
        rows = [
            (
                r["step"],
                *(f"{s:.2f}" for s in r["seconds"]),
                f"{r['seconds'][-1] / r['seconds'][0]:.2f}",
            )
            for r in run["rows"]
        ]
        parts.append(
            "Seconds, plain GPT, 8 ranks, one process. Identical layers are compiled once, so only "
            f"the capture, which is `torch.export`'s time, grows.\n\nOn {run['machine']}.\n"
        )
        parts.append(markdown_table(("step", *depths, "last / first"), rows))
    parts.append("## Time of a proof\n")
    for run in verify_time.values():
        rows = [
            (
                r["model"],
                f"{r['compile']:.2f}",
                f"{r['verify']:.2f}",
                f"{r['verify'] / r['compile']:.2f}",
            )
            for r in run["rows"]
        ]
        parts.append(
            "What `verify=True` adds to a compilation, in CPU seconds, for 2 ranks and inputs of "
            f"{' x '.join(map(str, run['shape']))} tokens.\n\nOn {run['machine']}.\n"
        )
        parts.append(markdown_table(("model", "compile", "verify=True adds", "ratio"), rows))
    parts.append("## Inductor\n")
    for name, about in _INDUCTOR_RUNS.items():
        parts += _run(about, inductor_time[name])
    parts.append("## Estimates of plans\n")
    run = region_times["cpu"]
    within = sum(abs(row["estimate"] - 1) <= _TOLERANCE for row in run["rows"])
    about = f"{_ESTIMATES} {within} of {len(run['rows'])} are within {_TOLERANCE:.0%}."
    parts += _run(about, run)
    return "\n".join(parts)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _run(about: str, run: Mapping[str, Any]) -> list[str]:
    """What one run measured, and its table."""
    shown = [column for column in _COLUMNS if column in run["rows"][0]]
    cells = [[_cell(row[column]) for column in shown] for row in run["rows"]]
    return [
        f"{about}\n\n{run['rounds']} round(s) on {run['machine']}.\n",
        markdown_table([_COLUMNS[column] for column in shown], cells),
    ]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a header."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def load(name: str) -> dict[str, Any]:
    """The stored results of one benchmark, by run."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def keep(name: str, run: str, rows: Iterable[Mapping[str, Any]], **settings: Any) -> None:
    """Store the rows of one run in ``benchmarks/results/`` and render the page anew.

    Both at once, because a test compares them, and must pass after every measurement.
    """
    save(RESULTS / f"{name}.json", run, rows, **settings)
    PAGE.write_text(page(*map(load, FILES)))


def keep_architecture(
    results_path: Path,
    page_path: Path,
    page_of: Callable[[dict[str, Any]], str],
    name: str,
    ranks: int,
    record: Mapping[str, Any],
) -> None:
    """Write the record of an architecture and the page that shows it: a test compares the two."""
    empty: dict[str, Any] = {"architectures": {}}
    results = json.loads(results_path.read_text()) if results_path.exists() else empty
    results["machine"] = machine()
    results["architectures"].setdefault(name, {})[str(ranks)] = dict(record)
    results_path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    page_path.write_text(page_of(results))


def main() -> None:
    """Print the page or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    text = page(*map(load, FILES))
    if parser.parse_args().write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
