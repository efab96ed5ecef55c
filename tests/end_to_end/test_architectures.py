"""Every architecture, compiled for several ranks, against itself on one device."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree

import sp_compiler
from benchmarks import coverage
from sp_compiler.compiler import to_program
from sp_compiler.ir.program import Program
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.trace.export import capture
from sp_compiler.verification.judge import backward
from tests.helpers import parity
from tests.models import architectures
from tests.models.architecture import Size

_TIGHT = 1e-9
_FLOORS = coverage.load()
# They take turns in the configurations: benchmarks/coverage.py measures each in all of them, and
# its floors are looked at below. The scan of qwen3_next takes minutes at awkward sizes.
_EVERYTHING = [
    (name, "dividing" if number % 2 or name == "qwen3_next" else "awkward")
    for number, name in enumerate(architectures.names())
]
# One of each kind of trap that is quick: what it is that the others do not have. Scans (mamba),
# windows (swin), two lengths (t5), two towers (siglip), latent attention (deepseek_v3), biases of
# experts (gpt_oss) and complex rotary embedding (llama4_text) take longest, so they are slow tests
# like the rest.
_FAST = [
    ("bloom", "dividing"),  # batch and heads in one dim, ALiBi
    ("phi3", "dividing"),  # fused gate_up
]
# Projections that are packed and taken apart by slices, views or splits, written ``x @ w.T``, or
# whose heads are fused with the batch. A block gathers and scatters once for each of its sublayers,
# which may be parallel; a single head of keys is gathered too.
_PACKED = {
    "phi3": "2G2S + 4G2S",
    "bloom": "2G2S + 4G2S",
    "xglm": "2G2S + 4G2S",
    "falcon": "1G1S + 2G1S",
    "mpt": "2G2S + 4G2S",
    "codegen": "1G2S + 2G1S",
    "gpt_bigcode": "4G2S + 6G4S",
}


def _check(name: str, configuration: str) -> None:
    """At one number of ranks: they take turns, a measurement of all is what stores the floors."""
    ranks = architectures.turn(name, configuration)
    size = architectures.size(configuration, ranks)
    case = architectures.case(name, size)
    _check_capture(case, name, size)
    found, floor = coverage.measure(case, ranks), _FLOORS[name][configuration][str(ranks)]
    assert found["output_error"] < _TIGHT
    assert found["gradient_error"] < _TIGHT
    assert found["flops"] >= floor["flops"]
    assert found["parameters"] >= floor["parameters"]
    assert set(found["fallbacks"]) <= set(floor["fallbacks"]), "a new fallback"
    assert found["collectives"] == floor["collectives"]
    _check_diff(case.program)
    if configuration == "dividing":
        _check_against_huggingface(name, ranks, found)


def _check_capture(case: parity.Case, name: str, size: Size) -> None:
    """What is captured is the model in eager, but for its own casts to float32."""
    with architectures.float64():
        model = architectures.build(name, size)
        if getattr(getattr(model, "config", None), "_experts_implementation", None) == "grouped_mm":
            model.set_experts_implementation("eager")  # grouped products know no float64
        outputs, out_spec = pytree.tree_flatten(model(**architectures.inputs(name, size)))
        backward(outputs, out_spec)
    for actual, true in zip(case.outputs, outputs, strict=True):
        torch.testing.assert_close(actual, true, rtol=1e-4, atol=1e-4, check_dtype=False)
    expected = {key: value.grad for key, value in model.named_parameters()}
    assert parity.gradient_error(case.grads, expected, floor=1e-2) < 1e-3


def _check_diff(program: Program) -> None:
    """A program does not differ from itself, whatever its nodes are called."""
    same, renamed = Snapshot.of_program("a", program), Snapshot.of_program("b", program)
    for graph in renamed.graphs.values():
        for index, node in enumerate(graph.nodes):
            node._rename(f"v{index}")
    assert sp_compiler.diff(same, renamed).is_empty


def _check_against_huggingface(name: str, ranks: int, found: dict[str, Any]) -> None:
    """Layers that HuggingFace shards by columns or rows are sharded, in whatever way."""
    model = architectures.build(name, architectures.size("dividing", ranks))
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


@pytest.mark.parametrize("name", architectures.names())
def test_every_number_kept_is_small(name: str) -> None:
    for found in _FLOORS[name].values():
        for record in found.values():
            assert max(record["output_error"], record["gradient_error"]) < _TIGHT


@pytest.mark.parametrize("name", architectures.names(decoder_only=True))
def test_language_models_are_sharded(name: str) -> None:
    for record in _FLOORS[name]["dividing"].values():
        assert record["flops"] >= 0.99
        assert record["parameters"] >= 0.99


@pytest.mark.slow
def test_latent_attention_is_sharded_at_its_real_widths() -> None:
    """Beside a vocabulary that is a hundred times their size its down projections weigh little."""
    fields = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "use_cache": False}
    with torch.device("meta"):
        config = transformers.DeepseekV3Config(**fields)
        model = transformers.DeepseekV3ForCausalLM(config).bfloat16()
        ids = torch.zeros(2, 16, dtype=torch.int64)
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    placements = shard(to_program(captured, CompileOptions(tp=8)), CompileOptions(tp=8))
    whole = [n for n, placement in placements.param_placements.items() if placement.is_replicated]
    assert all(model.get_parameter(name).ndim == 1 for name in whole)


@pytest.mark.parametrize(("name", "block"), _PACKED.items())
def test_packed_projections(name: str, block: str) -> None:
    assert _FLOORS[name]["dividing"]["2"]["collectives"] == block


def test_page_is_current() -> None:
    assert coverage.PAGE.read_text() == coverage.page(_FLOORS)
