"""Every architecture, compiled for several ranks, against itself on one device."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

from benchmarks import coverage
from tests import architectures

_TIGHT = 1e-9
_FLOORS = coverage.load()
_EVERYTHING = [
    (name, configuration)
    for name in architectures.names()
    for configuration in architectures.CONFIGURATIONS
]
# One of each kind of trap: what it is that the others do not have.
_FAST = [
    ("bloom", "dividing"),  # batch and heads in one dim, ALiBi
    ("codegen", "awkward"),  # qkv in groups of heads
    ("phi3", "dividing"),  # fused gate_up
    ("gemma3_text", "awkward"),  # q/k norms, post-norms, sliding windows
    ("deepseek_v3", "dividing"),  # latent attention, grouped experts
    ("gpt_oss", "dividing"),  # experts with biases, interleaved gates, attention sinks
    ("qwen2_moe", "awkward"),  # batched experts, shared expert, auxiliary loss
    ("llama4_text", "dividing"),  # complex rotary embedding
    ("mamba", "dividing"),  # convolution by groups, a scan
    ("gpt_bigcode", "awkward"),  # one head of keys and values
    ("deberta_v2", "dividing"),  # relative positions by gather
    ("albert", "awkward"),  # one layer used twice
    ("t5", "dividing"),  # bias of the attention, two lengths
    ("whisper", "awkward"),  # convolutional embedding
    ("swin", "dividing"),  # windows
    ("siglip", "awkward"),  # two towers, attention pooling
    ("torch_TransformerDecoder", "dividing"),  # given masks and memory
]


def _check(name: str, configuration: str) -> None:
    found, floor = coverage.measure(name, configuration), _FLOORS[name][configuration]
    assert found["output_error"] < _TIGHT
    assert found["gradient_error"] < _TIGHT
    assert found["flops"] >= floor["flops"]
    assert found["parameters"] >= floor["parameters"]
    assert set(found["fallbacks"]) <= set(floor["fallbacks"]), "a new fallback"
    assert found["tp"] == floor["tp"]
    if configuration == "dividing":
        _check_against_huggingface(name, found)


def _check_against_huggingface(name: str, found: dict[str, Any]) -> None:
    """Layers that HuggingFace shards by columns or rows are sharded, in whatever way."""
    model = architectures.build(name, architectures.setting(name, "dividing")[0])
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    weights = [key for key, value in model.named_parameters() if value.ndim >= 2]
    prefix = getattr(model, "base_model_prefix", "")
    for pattern, kind in plan.items():
        if not kind.startswith(("colwise", "rowwise", "packed_colwise", "packed_rowwise")):
            continue
        pattern = f"{prefix}.{pattern}"
        layers = [w for w in weights if fnmatch.fnmatch(w, pattern) or _is_weight_of(w, pattern)]
        assert set(layers) <= set(found["sharded_parameters"]), pattern


def _is_weight_of(weight: str, pattern: str) -> bool:
    return fnmatch.fnmatch(weight, f"{pattern}.weight")


@pytest.mark.parametrize(("name", "configuration"), _FAST)
def test_architecture(name: str, configuration: str) -> None:
    _check(name, configuration)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "configuration"), [case for case in _EVERYTHING if case not in _FAST]
)
def test_every_architecture(name: str, configuration: str) -> None:
    _check(name, configuration)


def test_there_are_59() -> None:
    assert len(architectures.names()) == 59
    assert set(_FLOORS) == set(architectures.names())


@pytest.mark.parametrize("name", architectures.names(decoder_only=True))
def test_language_models_are_sharded(name: str) -> None:
    """What is stored as floor is high; latent attention's small down projections stay whole."""
    floor = _FLOORS[name]["dividing"]
    assert floor["flops"] >= 0.99
    assert floor["parameters"] >= (0.97 if name == "deepseek_v3" else 0.99)


def test_page_is_current() -> None:
    assert coverage.PAGE.read_text() == coverage.page(_FLOORS)
