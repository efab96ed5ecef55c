"""Plans of models on grids, beside their plans on one device and the figures of papers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.command_line.models import load
from tests.helpers import expert_models
from tests.helpers.shared_programs import shared_captures
from tests.models import zoo


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with shared_captures():
        yield


@pytest.fixture(scope="module")
def model_and_inputs() -> tuple[Any, Any]:
    return zoo.build("gpt2", layers=4), ((), zoo.inputs("gpt2"))


@pytest.mark.slow
def test_one_device_is_the_plan_of_the_model(model_and_inputs: tuple[Any, Any]) -> None:
    whole = plan(*model_and_inputs, tp=2)
    found = plan(*model_and_inputs, mesh={"tp": 2}, microbatches=3)
    (stage,) = found.stages
    assert found.microbatch == replace(whole, passes=found.microbatch.passes)
    assert stage.activation_bytes == whole.activation_bytes
    assert stage.activation_bytes + stage.working_bytes == whole.activation_peak_bytes
    trained = sum(size.numel for size in whole.parameters.values())
    assert stage.state_bytes == 18 * trained
    assert sum(size.num_bytes for size in whole.parameters.values()) == whole.parameter_bytes
    # But for one all-reduce, which is once per step.
    assert found.step_us == pytest.approx(3 * whole.step_us, rel=0.15)


def test_stages_of_a_model(model_and_inputs: tuple[Any, Any]) -> None:
    split = plan(*model_and_inputs, mesh="2x2", microbatches=4)
    first, last = split.stages
    assert first.chunks[0] + last.chunks[0] == (
        "",
        *(f"transformer.h.{number}" for number in range(4)),
        "",
    )
    parameters = split.microbatch.parameters
    tied = parameters["transformer.wte.weight"].numel
    assert first.parameters + last.parameters == tied + sum(p.numel for p in parameters.values())
    data = json.loads(split.to_json())
    assert data["stages"][0]["total_bytes"] == first.total_bytes
    assert data["grid"]["gpus"] == 4
    assert "2 pipeline stages, schedule 1f1b, 4 microbatches; bubble" in str(split)
    for each, stage in zip(split.timeline.rank_times(), split.stages, strict=True):
        exposed_us = each.exposed_us["tp"] - split.timeline.reduction_us
        assert each.compute_us + exposed_us == pytest.approx(4 * stage.microbatch_us)
        assert each.recompute_us <= each.compute_us
    # The embedding and the head are on either end: the slower rank waits less.
    assert "Rank 1 of the pipeline, which computes most: computes" in str(split)
    hidden = next(t for t in split.microbatch.blocks[1].kept if t.name == "hidden")
    (pp,) = (each for each in split.traffic if each.axis == "pp")
    assert pp.sent_bytes == 4 * hidden.num_bytes  # one rank's part of the tokens, per microbatch


def test_arguments_that_do_not_fit_each_other(model_and_inputs: tuple[Any, Any]) -> None:
    with pytest.raises(ArgumentError, match="size of tp from mesh=; leave out tp="):
        plan(*model_and_inputs, tp=2, mesh="2x2", microbatches=4)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="a grid needs microbatches="):
        plan(*model_and_inputs, mesh="2x2")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="microbatches=4 without mesh="):
        plan(*model_and_inputs, microbatches=4)  # type: ignore[call-overload]
    for name, value in (("schedule", "gpipe"), ("stages_per_rank", 2), ("gpus_per_node", 4)):
        with pytest.raises(ArgumentError, match=f"{name}={value!r} without mesh="):
            plan(*model_and_inputs, tp=2, **{name: value})  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="without a grid use memory_budget= or device_memory="):
        plan(*model_and_inputs, tp=2, recompute="auto", memory="1GiB")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="returns no loss"):
        plan(zoo.build("gpt2_logits"), ((), zoo.inputs("gpt2_logits")), mesh="1x2", microbatches=2)


@pytest.mark.slow
def test_mt_nlg_530b_takes_the_papers_memory() -> None:
    """Figures of arXiv 2201.11990, section 2, and of arXiv 2205.05198, sections 4 and 5."""
    loaded = load(None, "mt-nlg-530b")
    inputs = (loaded.model, loaded.example_inputs)
    layers, hidden, tokens, vocabulary, tp, pp = 105, 20480, 2048, 51200, 8, 35
    found = plan(
        *inputs,
        mesh="8x35x8",
        microbatches=280,
        bytes_per_parameter=20,
        recompute="attention",
        dropout="stored",
    )
    assert found.grid.gpus == 2240
    # 20 bytes per parameter, more than 10 TB in one copy of the model.
    extra = 1 + 13 / (12 * hidden) + (vocabulary + tokens) / (12 * layers * hidden)
    parameters = 12 * layers * hidden**2 * extra
    state = tp * sum(stage.state_bytes for stage in found.stages)
    assert state == pytest.approx(20 * parameters, rel=0.02)
    assert state > 10e12
    # 34 s b h / t per layer, for L layers on the first stage; and its embedding's dropout mask.
    unit = tokens * hidden / tp
    assert [stage.in_flight for stage in found.stages] == list(range(pp, 0, -1))
    first = found.stages[0].activation_bytes
    assert first == pytest.approx((34 * layers + pp) * unit, rel=0.02)

    # With three chunks per stage (1 + (p - 1) / (3 p)) times as many layers.
    options = {"schedule": "interleaved", "stages_per_rank": 3, "recompute": "full"}
    deep = plan(*inputs, mesh="8x35x8", microbatches=280, **options)  # type: ignore[call-overload]
    assert deep.stages[0].in_flight == layers * (1 + (pp - 1) / (3 * pp))
    # The inputs of all layers: 8.8 GB per microbatch over the ranks of tp.
    (block,) = (each for each in deep.microbatch.blocks if each.num_calls > 1)
    assert tp * block.num_calls * block.kept_bytes == pytest.approx(8.8e9, rel=0.02)


def test_experts_are_divided_and_their_rows_are_sent() -> None:
    model, batch = expert_models.model(expert_models.Grouped), expert_models.batches(1)[0]
    counts = {name: value.numel() for name, value in model.named_parameters()}
    of_experts = sum(count for name, count in counts.items() if "experts" in name)
    others = sum(counts.values()) - of_experts
    found = plan(model, ((), batch), mesh="ep=2,dp_shard=2", microbatches=3)
    # Of two ranks' experts, each shards one half; all four shard the rest.
    assert found.stages[0].state_bytes == 18 * (of_experts / 2 / 2 + others / 4)
    rows, replicated = {axis.axis: axis for axis in found.traffic}, 8 * others
    # Two products of 24 rows in each of two layers, forward and backward; half stay on the rank.
    numbers_of_rows = 2 * 8 * 2 * 2
    assert rows["ep"].sent_bytes == 3 * ((2 * 4 * 24 * 6 * 8 + numbers_of_rows) // 2)
    divided = 8 * of_experts // 2
    assert rows["dp_shard x ep"].sent_bytes == 3 * (3 * replicated * 3 // 4 + 3 * divided // 2)
    assert found.step_us > 3 * found.microbatch.step_us


def test_experts_are_divided_in_every_stage() -> None:
    model, batch = expert_models.model(expert_models.Grouped), expert_models.batches(1)[0]
    whole, cut = (
        plan(model, ((), batch), mesh=f"ep=2,dp_shard=2,pp={pp}", microbatches=3) for pp in (1, 2)
    )
    assert [stage.chunks for stage in cut.stages] == [(("", "layers.0"),), (("layers.1", ""),)]
    rows, in_stages = ({axis.axis: axis for axis in found.traffic}["ep"] for found in (whole, cut))
    # One of two layers in each stage.
    assert 2 * in_stages.sent_bytes == rows.sent_bytes
    assert sum(stage.state_bytes for stage in cut.stages) == whole.stages[0].state_bytes
    of_layer = {n: p for n, p in model.named_parameters() if n.startswith("layers.0")}
    of_experts = sum(p.numel() for n, p in of_layer.items() if "experts" in n)
    gathered = 8 * (sum(p.numel() for p in [*of_layer.values(), model.tokens.weight]))
    # Values and gradients; of experts those of this rank's half, which dp_shard alone gathers.
    assert cut.stages[0].gathered_bytes == 2 * (gathered - 8 * of_experts // 2)
    assert cut.step_us > max(stage.microbatch_us for stage in cut.stages) * 3
