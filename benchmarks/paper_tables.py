"""The tables of the activation-recomputation paper, from the compiler's own graphs.

    python -m benchmarks.paper_tables [--models gpt-22b ...] [--write]

Every "ours" is counted on the generated forward and backward of one layer (and of the code outside
of layers) at the paper's sizes, using only shapes; the paper's side is its printed value, or if it
prints a formula, the formula's. Source: Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198: table 2 (bytes of a layer), figure 7 (percent of the
baseline), section 5 and appendix A (FLOPs), tables 3 and 5 (times, MFU, HFU).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import paper_times
from benchmarks.models import PAPER_SETUPS, PaperSetup, PlainGPT
from benchmarks.paper_setup import BASELINE, REPORTED, SETTINGS, Row
from benchmarks.performance import markdown_table
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.options import CompileOptions, Dropout
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.trace.export import capture

GIB = 2**30
A100_FLOPS = 312e12
STATE_BYTES = 18
"""A parameter: 16-bit value and gradient sum in 32 bit, 32-bit master copy and two moments."""

PAGE = Path(__file__).parents[1] / "docs" / "paper.md"
_HEAD = ("model", "", "paper", "ours", "difference")
_PAGE_HEAD = """# The paper's numbers, from the compiler's graphs

Written by `python -m benchmarks.paper_tables --write`; not edited by hand.

The tables of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, next to numbers from sp_compiler's graphs: how well the two agree, and what the
compiler saves beyond the paper. *Ours* is counted on the generated forward and backward of a layer
of a plain GPT, and on the code outside of its layers, at the paper's sizes and tensor-parallel
ranks, in bfloat16. *Paper* is the paper's value or, if it gives a formula, the formula's value.
Rows named *sp_compiler* have `recompute="selective"` and regenerated dropout masks; they are
compared with the paper's best setting.
"""

ALONE = {
    # saved activations and added FLOPs of one unparallelised model, percent (section 5)
    "gpt3-175b": (70.0, 2.7),
    "mt-nlg-530b": (65.0, 1.6),
}
TableRows = Callable[[str], Iterator[Row]]


@cache
def compilation(
    name: str, num_layers: int, tp: int, sequence_parallel: bool, dropout: Dropout
) -> Compilation:
    """The model ``name`` with ``num_layers`` of its layers in bfloat16, sharded once for all
    settings of recomputation."""
    setup = PAPER_SETUPS[name]
    with torch.device("meta"):
        model = PlainGPT(replace(setup.model, num_layers=num_layers)).bfloat16()
        ids = torch.zeros(setup.micro_batch, setup.sequence_length, dtype=torch.long)
    options = CompileOptions(tp=tp, sequence_parallel=sequence_parallel, dropout=dropout)
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    return Compilation(to_program(captured, options), options)


@cache
def planned(name: str, num_layers: int, tp: int, **options: Any) -> Plan:
    """The plan of the model ``name`` with ``num_layers`` of its layers, in bfloat16."""
    wanted = CompileOptions(tp=tp, **options)
    shared = compilation(name, num_layers, tp, wanted.sequence_parallel, wanted.dropout)
    return make_plan(shared.finish(wanted), wanted)


def layer_bytes(name: str, tp: int, **options: Any) -> int:
    """Bytes that one layer keeps for backward on one rank."""
    (block,) = [block for block in planned(name, 2, tp, **options).blocks if block.num_calls == 2]
    return block.kept_bytes


def of_the_paper(name: str, setting: str) -> float:
    """The formula of table 2 at the sizes of ``name``, in bytes."""
    setup, formula = PAPER_SETUPS[name], SETTINGS[setting].formula
    assert formula is not None
    h, s = setup.model.hidden_size, setup.sequence_length
    core = setup.model.num_heads * s / h
    return s * setup.micro_batch * h * formula(setup.tensor_parallel, core)


def bytes_of_a_layer(name: str) -> Iterator[Row]:
    """Table 2, MiB; the last row is beyond the paper, beside its best."""
    for setting, how in SETTINGS.items():
        ours = layer_bytes(name, PAPER_SETUPS[name].tensor_parallel, **how.options)
        paper = of_the_paper(name, setting if how.formula else "both")
        yield name, setting, paper / 2**20, ours / 2**20


def percent_of_baseline(name: str) -> Iterator[Row]:
    """Figure 7."""
    tp = PAPER_SETUPS[name].tensor_parallel
    baseline = layer_bytes(name, tp, **SETTINGS[BASELINE].options)
    for setting, how in SETTINGS.items():
        paper = of_the_paper(name, setting if how.formula else "both")
        ours = 100 * layer_bytes(name, tp, **how.options) / baseline
        yield name, setting, 100 * paper / of_the_paper(name, BASELINE), ours


def first_stage(name: str) -> Iterator[Row]:
    """Memory of a GPU of the first pipeline stage, GiB: as many microbatches as stages at once."""
    setup, chunks = PAPER_SETUPS[name], REPORTED[name].chunks
    p, layers = setup.pipeline_parallel, setup.model.num_layers
    in_flight = layers * (1 + (p - 1) / (p * chunks)) if chunks > 1 else layers
    for setting, how in SETTINGS.items():
        ours = layer_bytes(name, setup.tensor_parallel, **how.options)
        paper = of_the_paper(name, setting if how.formula else "both")
        yield name, setting, in_flight * paper / GIB, in_flight * ours / GIB
    yield name, "parameters, optimizer", _paper_state(setup), _our_state(name, layers // p)


def _paper_state(setup: PaperSetup) -> float:
    """12h² (1 + 13/12h) of a layer and (v + s) h outside of layers, by 18 bytes, GiB."""
    model = setup.model
    h, layers = model.hidden_size, model.num_layers // setup.pipeline_parallel
    of_layers = layers * 12 * h * h * (1 + 13 / (12 * h))
    outside = (model.vocab_size + setup.sequence_length) * h
    return STATE_BYTES * (of_layers + outside) / setup.tensor_parallel / GIB


def _our_state(name: str, layers: int) -> float:
    options = SETTINGS["sp_compiler"].options
    tp = PAPER_SETUPS[name].tensor_parallel
    two, three = (planned(name, count, tp, **options).parameter_bytes for count in (2, 3))
    return STATE_BYTES * (two + (layers - 2) * (three - two)) / 2 / GIB


def flops(name: str, recompute: str) -> tuple[float, float]:
    """(model, hardware) FLOPs of a step of the whole batch on all GPUs."""
    setup, options = PAPER_SETUPS[name], {**SETTINGS["both"].options, "recompute": recompute}
    two, three = (planned(name, n, setup.tensor_parallel, **options).work for n in (2, 3))
    depth = setup.model.num_layers - 2
    scale = setup.tensor_parallel * setup.global_batch / setup.micro_batch
    model = two.model_flops + depth * (three.model_flops - two.model_flops)
    hardware = two.hardware_flops + depth * (three.hardware_flops - two.hardware_flops)
    return scale * model, scale * hardware


def flops_and_utilisation(name: str) -> Iterator[Row]:
    """The paper's FLOPs (equations 7 and 8), and MFU and HFU of table 5 from its times.

    Its hardware FLOPs are an upper bound: s/3h for s/6h counts forward and backward of the core
    again. The graph re-runs only the matmul of queries and keys, s/36h more.
    """
    setup, reported = PAPER_SETUPS[name], REPORTED[name]
    size, s = setup.model, setup.sequence_length
    h, depth, v = size.hidden_size, size.num_layers, size.vocab_size
    base = 72 * setup.global_batch * depth * s * h * h
    model, hardware = flops(name, "attention")
    yield name, "model PFLOPs", base * (1 + s / (6 * h) + v / (12 * h * depth)) / 1e15, model / 1e15
    added = base * (1 + s / (3 * h) + v / (12 * h * depth))
    yield name, "hardware PFLOPs", added / 1e15, hardware / 1e15
    peak = A100_FLOPS * setup.tensor_parallel * setup.pipeline_parallel * reported.seconds
    yield name, "MFU, percent", reported.mfu, 100 * model / peak
    yield name, "HFU, percent", reported.hfu, 100 * hardware / peak


def selective_alone(name: str) -> Iterator[Row]:
    """Selective recomputation of an unparallelised model: activations saved, FLOPs added."""
    if name not in ALONE:
        return
    saved, added = ALONE[name]
    none, attention = (
        layer_bytes(name, 1, recompute=recompute, dropout="stored")
        for recompute in ("none", "attention")
    )
    yield name, "activations saved, percent", saved, 100 * (1 - attention / none)
    model, hardware = flops(name, "attention")
    yield name, "FLOPs added, percent", added, 100 * (hardware / model - 1)
    _, hardware = flops(name, "selective")
    yield name, "FLOPs added by sp_compiler, percent", added, 100 * (hardware / model - 1)


TABLES: dict[str, TableRows] = {
    "Kept for backward by a layer, MiB (table 2)": bytes_of_a_layer,
    "Percent of the tensor-parallel baseline (figure 7)": percent_of_baseline,
    "Memory of a GPU of the first stage, GiB": first_stage,
    "FLOPs, MFU and HFU at the paper's times (table 5)": flops_and_utilisation,
    "Selective recomputation alone (section 5)": selective_alone,
}


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, with the difference."""
    model, quantity, paper, ours = row
    return model, quantity, f"{paper:.2f}", f"{ours:.2f}", f"{100 * (ours / paper - 1):+.2f} %"


def page(tables: Mapping[str, Sequence[Row]]) -> str:
    """The text of ``docs/paper.md``."""
    parts = [_PAGE_HEAD]
    for title, rows in tables.items():
        parts.append(f"## {title}\n\n{markdown_table(_HEAD, map(cells, rows))}")
    return "\n".join(parts)


def main() -> None:
    """Print each table: paper, ours, difference; write them to ``docs/paper.md`` if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PAPER_SETUPS, default=list(PAPER_SETUPS))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, all models")
    options = parser.parse_args()
    models = list(PAPER_SETUPS) if options.write else options.models
    console = Console()
    found: dict[str, list[Row]] = {}
    for title, rows in TABLES.items():
        names = track(models, title, console=console, transient=True)
        found[title] = [row for name in names for row in rows(name)]
        table = Table(*_HEAD, title=title)
        for row in found[title]:
            table.add_row(*cells(row))
        console.print(table)
    if options.write:
        _, heading, times = PAGE.read_text().partition(paper_times.HEADING)
        PAGE.write_text(f"{page(found)}\n{heading}{times}")


if __name__ == "__main__":
    main()
