"""The list of PyTorch's internals is complete, and small contracts that have no better place."""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn
from torch._dynamo import config as dynamo_config

from tests.docs.torch_internals import ROOT, uses

PAGE = (ROOT / "docs" / "torch_internals.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]


def _listed() -> set[str]:
    return {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}


def _is_listed(name: str, entries: set[str]) -> bool:
    return name in entries or any(
        entry.endswith(".*") and name.startswith(entry[:-1]) for entry in entries
    )


def test_every_internal_is_on_the_page() -> None:
    missing = {name: where for name, where in uses().items() if not _is_listed(name, _listed())}
    assert not missing


def test_the_page_lists_nothing_else() -> None:
    assert not [name for name in _listed() if not any(_is_listed(use, {name}) for use in uses())]


def test_every_contract_test_exists() -> None:
    modules = (ROOT / "tests").rglob("test_*.py")
    functions = {
        name
        for path in modules
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert ROWS
    assert {row[-1].strip(" `") for row in ROWS} <= functions


def test_the_cache_of_fakes_can_be_switched_off() -> None:
    before = dynamo_config.fake_tensor_cache_enabled
    with dynamo_config.patch(fake_tensor_cache_enabled=False):
        assert torch._dynamo.config.fake_tensor_cache_enabled is False
    assert dynamo_config.fake_tensor_cache_enabled is before


def test_a_transformer_encoder_asks_for_the_causal_hint() -> None:
    """Its layers take no other way from a mask to ``is_causal``."""
    detect = nn.modules.transformer._detect_is_causal_mask
    assert list(inspect.signature(detect).parameters) == ["mask", "is_causal", "size"]
    for module in (nn.TransformerEncoder, nn.TransformerDecoder):
        assert "_detect_is_causal_mask(" in inspect.getsource(module.forward)
