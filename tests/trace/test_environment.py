"""What is set aside while a model is captured."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn

from sp_compiler.trace.environment import without_cache
from tests.models import zoo


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_that_there_is_no_cache(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    model = zoo.build("llama", use_cache=True)
    said = contextlib.nullcontext() if rank else pytest.warns(UserWarning, match="keeps no cache")
    with said, without_cache(model, asked=True):
        assert model.config.use_cache is False  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "warns"), [("bert", False), ("gpt2", True), ("t5", True), ("no attention", True)]
)
def test_a_model_that_keeps_no_cache_misses_none(name: str, warns: bool) -> None:
    """The default of HuggingFace's configurations, which no user has set, is True for all."""
    if name == "no attention":
        model: nn.Module = nn.Linear(2, 2)
        model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    else:
        model = zoo.build(name, use_cache=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for argument in (False, None):  # of a call that asks for none, and of one without
            assert not said
            with without_cache(model, asked=argument):
                assert model.config.use_cache is False  # type: ignore[union-attr]
    assert [("keeps no cache" in str(each.message)) for each in said] == [True] * warns
