"""Bytes that a block of the paper's models saves for backward, against the paper's formulas.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, table 2. Shapes only: nothing of this size is computed.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
import sympy
import torch

from benchmarks.models import PAPER_SETUPS, PlainGPT
from benchmarks.paper_tables import planned
from sp_compiler.api import plan
from sp_compiler.planning.data import BlockPlan
from sp_compiler.planning.plan import Plan

T = 8
TOLERANCE = 1e-3

# What the paper leaves out: the mean and the inverse deviation of each row of two norms, in bf16,
# and the seed that dropout masks are drawn from again.
STATISTICS = {
    f"{norm}_{row}" for norm in ("attention_norm", "mlp_norm") for row in ("mean", "rstd")
}
SEED = {"seed"}

# What a block keeps in units of sbh, and what is kept besides.
ROWS: list[tuple[dict[str, Any], str, set[str]]] = [
    # The paper's own rows, with the masks kept.
    (
        {"tp": 1, "recompute": "none", "dropout": "stored"},
        "34 + 5*a*s/h",
        STATISTICS,
    ),
    (
        {"recompute": "none", "sequence_parallel": False, "dropout": "stored"},
        "10 + 24/t + 5*a*s/(h*t)",
        STATISTICS,
    ),
    (
        {"recompute": "none", "dropout": "stored"},
        "(34 + 5*a*s/h)/t",
        STATISTICS,
    ),
    (
        {"recompute": "attention", "sequence_parallel": False, "dropout": "stored"},
        "10 + 24/t",
        STATISTICS,
    ),
    ({"recompute": "attention", "dropout": "stored"}, "34/t", STATISTICS),
    (
        {"recompute": "full", "sequence_parallel": False, "dropout": "stored"},
        "2",
        set(),
    ),
    ({"recompute": "full", "dropout": "stored"}, "2/t", set()),
    # The same with masks drawn again in backward: 2sbh of masks less, and as²b of the core's.
    (
        {"recompute": "none", "sequence_parallel": False},
        "8 + 24/t + 4*a*s/(h*t)",
        STATISTICS,
    ),
    ({"recompute": "none"}, "(32 + 4*a*s/h)/t", STATISTICS),
    (
        {"recompute": "attention", "sequence_parallel": False},
        "8 + 24/t",
        STATISTICS,
    ),
    ({"recompute": "attention"}, "32/t", STATISTICS),
    # Below the paper: pointwise and row-wise results are computed again too.
    ({"recompute": "selective"}, "20/t", set()),
    (
        {"recompute": "selective", "sequence_parallel": False},
        "4 + 16/t",
        set(),
    ),
    ({"recompute": "selective", "dropout": "stored"}, "22/t", set()),
]


@lru_cache
def _model(preset: str) -> PlainGPT:
    config = dataclasses.replace(PAPER_SETUPS[preset].model, num_layers=2)
    with torch.device("meta"):
        return PlainGPT(config).bfloat16()


def _inputs(preset: str) -> dict[str, Any]:
    setup = PAPER_SETUPS[preset]
    with torch.device("meta"):
        ids = torch.zeros(setup.micro_batch, setup.sequence_length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _plan(preset: str, options: dict[str, Any]) -> tuple[Plan, BlockPlan]:
    options = {"tp": T, **options}
    if preset == "gpt-22b":
        found = planned(preset, 2, **options)
    else:  # a batch of one, whose formula is derived at a larger one
        found = plan(_model(preset), ((), _inputs(preset)), **options)
    (block,) = [block for block in found.blocks if block.num_calls == 2]
    return found, block


@pytest.mark.parametrize(
    ("preset", "options", "formula", "ignored"),
    [
        pytest.param(
            preset,
            *row,
            id="-".join(map(str, (*row[0].values(), preset))),
            marks=pytest.mark.slow if preset != "gpt-22b" or number % 8 else (),
        )
        for preset in ("gpt-22b", "gpt3-175b")
        for number, row in enumerate(ROWS)
        # Of the larger model, which differs in numbers alone, one row.
        if preset == "gpt-22b" or number == 1
    ],
)
def test_a_block_keeps_what_the_formula_says(
    preset: str, options: dict[str, Any], formula: str, ignored: set[str]
) -> None:
    """In numbers, and in symbols derived from the graph alone."""
    setup = PAPER_SETUPS[preset]
    config, (found, block) = setup.model, _plan(preset, options)
    sizes = {
        "b": setup.micro_batch,
        "s": setup.sequence_length,
        "h": config.hidden_size,
        "a": config.num_heads,
        "t": found.tp,
    }
    symbols = {name: sympy.Symbol(name, positive=True, integer=True) for name in sizes}
    paper = sympy.sympify(f"b*s*h*({formula})", symbols)
    expected = int(paper.subs({symbols[name]: size for name, size in sizes.items()}))
    derived = found.activation_formula
    assert sympy.expand(derived.widths_only(derived.blocks[block.name]) - paper) == 0
    assert derived.value(derived.blocks[block.name]) == block.kept_bytes
    beyond = {tensor.name for tensor in block.kept} & (ignored | SEED)
    assert beyond >= ignored, "a tensor that is meant to be ignored is not there"
    counted = sum(tensor.num_bytes for tensor in block.kept if tensor.name not in beyond)
    assert counted == expected
    assert block.kept_bytes == pytest.approx(expected, rel=TOLERANCE)
