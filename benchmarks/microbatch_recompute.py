"""Plans of the paper's pipelines with activations of as many microbatches as fit.

    python -m benchmarks.microbatch_recompute [--models gpt3-175b] [--memory 75]

Korthikanti et al., arXiv 2205.05198, appendix C: a stage keeps all activations of some microbatches
and recomputes the attention core of the others, which the paper measures to add 0.7 points of MFU
to the 175B model and 0.4 to the 530B one. Profile "a100"; ``--memory`` GiB of a device, of which
each of its interleaved stages gets an equal part.
"""

from __future__ import annotations

import argparse

import torch

import sp_compiler
from benchmarks.models import PAPER_SETUPS, PlainGPT
from benchmarks.paper_setup import REPORTED
from benchmarks.performance import markdown_table
from sp_compiler.base.units import bytes_text, time_text

MODELS = ("gpt3-175b", "mt-nlg-530b")


def _row(name: str, memory_gib: float, recompute_rest: str | None) -> list[str]:
    setup, chunks = PAPER_SETUPS[name], REPORTED[name].chunks
    with torch.device("meta"):
        model = PlainGPT(setup.model).bfloat16()
        ids = torch.zeros(setup.micro_batch, setup.sequence_length, dtype=torch.long)
    options = {} if recompute_rest is None else {"recompute_rest": recompute_rest}
    plan = sp_compiler.plan(
        model,
        ((ids,), {"labels": ids}),
        mesh={"tp": setup.tensor_parallel, "pp": setup.pipeline_parallel},
        microbatches=setup.global_batch // setup.micro_batch,
        schedule="interleaved",
        stages_per_rank=chunks,
        memory=f"{memory_gib / chunks}GiB",
        recompute="attention" if recompute_rest is None else "none",
        hardware="a100",
        **options,
    )
    saving = "" if recompute_rest is None else ", ".join(map(str, plan.stages[0].saving))
    return [
        name,
        "attention" if recompute_rest is None else f"none, else {recompute_rest}",
        saving,
        bytes_text(plan.total_bytes),
        time_text(plan.step_us),
        f"{100 * plan.mfu:.1f} %",
    ]


def main() -> None:
    """Print both plans of each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--memory", type=float, default=75.0, help="GiB of a device")
    asked = parser.parse_args()
    rows = [_row(name, asked.memory, rest) for name in asked.models for rest in (None, "attention")]
    header = ["model", "recompute", "first rank's microbatches with none", "memory", "step", "MFU"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
