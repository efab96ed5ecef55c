"""What a block of the paper's models keeps for backward, against the paper's own formulas.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, table 2. Shapes only: nothing of this size is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from benchmarks.models import PAPER_SETUPS, PlainGPT
from sp_compiler.plan import BlockPlan
from sp_compiler.planning import plan

T = 8
TOLERANCE = 1e-3
Formula = Callable[[float], float]
"""Bytes in units of sbh, of the attention's share ``as/h``."""

# What the paper leaves out: the mean and the inverse deviation of each row of two norms, in bf16,
# and the seed that dropout masks are drawn from again.
STATISTICS = {"mean", "rstd", "mean_1", "rstd_1"}
SEED = {"seed"}

ROWS: list[tuple[dict[str, Any], Formula, set[str]]] = [
    # The paper's own rows, with the masks kept.
    (
        {"recompute": "none", "sequence_parallel": False, "dropout": "stored"},
        lambda attention: 10 + 24 / T + 5 * attention / T,
        STATISTICS,
    ),
    (
        {"recompute": "none", "dropout": "stored"},
        lambda attention: 34 / T + 5 * attention / T,
        STATISTICS,
    ),
    (
        {"recompute": "attention", "sequence_parallel": False, "dropout": "stored"},
        lambda attention: 10 + 24 / T,
        STATISTICS,
    ),
    ({"recompute": "attention", "dropout": "stored"}, lambda attention: 34 / T, STATISTICS),
    (
        {"recompute": "full", "sequence_parallel": False, "dropout": "stored"},
        lambda attention: 2,
        set(),
    ),
    ({"recompute": "full", "dropout": "stored"}, lambda attention: 2 / T, set()),
    # The same with masks drawn again in backward: 2sbh of masks less, and as²b of the core's.
    (
        {"recompute": "none", "sequence_parallel": False},
        lambda attention: 8 + 24 / T + 4 * attention / T,
        STATISTICS,
    ),
    ({"recompute": "none"}, lambda attention: (32 + 4 * attention) / T, STATISTICS),
    (
        {"recompute": "attention", "sequence_parallel": False},
        lambda attention: 8 + 24 / T,
        STATISTICS,
    ),
    ({"recompute": "attention"}, lambda attention: 32 / T, STATISTICS),
    # Below the paper: pointwise and row-wise results are computed again too.
    ({"recompute": "selective"}, lambda attention: 20 / T, set()),
    (
        {"recompute": "selective", "sequence_parallel": False},
        lambda attention: 4 + 16 / T,
        set(),
    ),
    ({"recompute": "selective", "dropout": "stored"}, lambda attention: 22 / T, set()),
]


@lru_cache(maxsize=1)
def _model(preset: str) -> PlainGPT:
    config = dataclasses.replace(PAPER_SETUPS[preset].model, num_layers=2)
    with torch.device("meta"):
        return PlainGPT(config).bfloat16()


def _block(preset: str, options: dict[str, Any]) -> BlockPlan:
    setup = PAPER_SETUPS[preset]
    with torch.device("meta"):
        ids = torch.zeros(setup.micro_batch, setup.sequence_length, dtype=torch.long)
    found = plan(_model(preset), ((), {"input_ids": ids, "labels": ids}), tp=T, **options)
    (block,) = [block for block in found.blocks if block.num_calls == 2]
    return block


@pytest.mark.parametrize("preset", ["gpt-22b", pytest.param("gpt3-175b", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "formula", "ignored"),
    ROWS,
    ids=["-".join(map(str, options.values())) for options, _, _ in ROWS],
)
def test_a_block_keeps_what_the_formula_says(
    preset: str, options: dict[str, Any], formula: Formula, ignored: set[str]
) -> None:
    setup = PAPER_SETUPS[preset]
    config, s, b = setup.model, setup.sequence_length, setup.micro_batch
    sbh = s * b * config.hidden_size
    expected = sbh * formula(config.num_heads * s / config.hidden_size)
    block = _block(preset, options)
    beyond = {tensor.name for tensor in block.kept} & (ignored | SEED)
    assert beyond >= ignored, "a tensor that is meant to be ignored is not there"
    counted = sum(tensor.num_bytes for tensor in block.kept if tensor.name not in beyond)
    assert counted == expected
    assert block.kept_bytes == pytest.approx(expected, rel=TOLERANCE)
