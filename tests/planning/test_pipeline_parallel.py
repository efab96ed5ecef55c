"""Stages of a pipeline, and a plan as a page."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.planning.pipeline_parallel import CallPlan, ParameterSize, PipelinePlan, pipeline
from sp_compiler.planning.plan import Plan
from tests.models import zoo


def _calls(layers: int) -> list[CallPlan]:
    """Layers that keep 10 bytes each and share a mask of 7; embedding and head share a weight."""

    def layer(number: int) -> CallPlan:
        kept = ((0, 7), (number + 1, 10))
        return CallPlan("Block", f"blocks.{number}", (f"w{number}",), kept, 3, 1.0)

    first = CallPlan("Prologue", "", ("embedding",), ((0, 7),), 1, 0.5)
    last = CallPlan("Epilogue", "", ("norm", "embedding"), ((1000, 40),), 50, 2.0)
    return [first, *map(layer, range(layers)), last]


def _sizes(layers: int) -> dict[str, ParameterSize]:
    of_layers = {f"w{number}": ParameterSize(100, 200, True) for number in range(layers)}
    others = {"embedding": ParameterSize(1000, 2000, True), "norm": ParameterSize(8, 16, False)}
    return {**of_layers, **others}


def _of(layers: int, stages: int, microbatches: int, **options: Any) -> PipelinePlan:
    return pipeline(_calls(layers), _sizes(layers), stages, microbatches, **options)


def test_stages_of_1f1b() -> None:
    found = _of(8, 4, 16)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.activation_bytes for stage in found.stages] == [4 * 27, 3 * 27, 2 * 27, 67]
    assert [stage.working_bytes for stage in found.stages] == [3, 3, 3, 50]
    assert found.stages[0].chunks == (("", "blocks.0", "blocks.1"),)
    assert found.stages[3].chunks == (("blocks.6", "blocks.7", ""),)
    assert found.bubble == 3 / 16
    assert found.step_us == 16 * 4.0 * (1 + 3 / 16)


def test_a_weight_of_two_stages_is_on_both() -> None:
    first, _, last = _of(3, 3, 3).stages
    assert first.parameters == 1000 + 100
    assert first.state_bytes == 18 * 1100
    assert last.parameters == 100 + 8 + 1000
    assert last.state_bytes == 18 * 1100 + 16  # a frozen norm has no optimizer
    assert _of(3, 1, 3).stages[0].parameters == 1000 + 300 + 8
    assert _of(3, 3, 3, bytes_per_parameter=16).stages[0].state_bytes == 16 * 1100


def test_fewer_microbatches_than_stages() -> None:
    assert [stage.in_flight for stage in _of(8, 4, 2).stages] == [2, 2, 2, 1]


@pytest.mark.parametrize(("stages", "chunks"), [(4, 2), (4, 3), (2, 6), (6, 2)])
def test_interleaved_layers_in_flight_are_the_papers(stages: int, chunks: int) -> None:
    """L (1 + (p - 1) / (p m)) layers of one microbatch on the first stage."""
    layers = 24
    equal = [call for call in _calls(layers) if call.path]
    found = pipeline(equal, _sizes(layers), stages, 2 * stages, chunks=chunks)
    of_one = layers / (stages * chunks)
    in_layers = layers * (1 + (stages - 1) / (stages * chunks))
    assert found.stages[0].in_flight * of_one == in_layers
    masks = 7 * found.stages[0].in_flight
    assert found.stages[0].activation_bytes == 10 * in_layers + masks
    assert found.bubble == (stages - 1) / (chunks * 2 * stages)


def test_a_model_without_layers_is_one_stage() -> None:
    calls = [call for call in _calls(1) if not call.path]
    (stage,) = pipeline(calls, _sizes(1), 1, 2).stages
    assert stage.chunks == (("", ""),)
    with pytest.raises(ArgumentError, match="the model has 0"):
        pipeline(calls, _sizes(1), 2, 2)


def test_chunks_of_a_stage_are_apart() -> None:
    found = _of(8, 2, 4, chunks=2)
    assert found.stages[0].chunks == (("", "blocks.0", "blocks.1"), ("blocks.4", "blocks.5"))
    assert found.stages[1].chunks == (("blocks.2", "blocks.3"), ("blocks.6", "blocks.7", ""))


@pytest.mark.parametrize("stages", [1, 3, 4, 7])
def test_layers_that_do_not_divide(stages: int) -> None:
    found = _of(10, stages, 8)
    counts = [sum(map(bool, stage.chunks[0])) for stage in found.stages]
    assert sum(counts) == 10
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts), "the first stage has most in flight"
    paths = [path for stage in found.stages for path in stage.chunks[0]]
    assert paths == [call.path for call in _calls(10)]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((9, 4), {}, "need 9 layers, and the model has 8"),
        ((4, 4), {"chunks": 3}, "need 12 layers"),
        ((4, 6), {"chunks": 2}, "microbatches=6: .* multiple of stages=4"),
        ((0, 4), {}, "stages=0: expected a positive integer"),
        ((2, True), {}, "microbatches=True"),
        ((2, 2), {"chunks": 1.0}, "chunks=1.0"),
        ((2, 2), {"bytes_per_parameter": 0}, "bytes_per_parameter=0"),
    ],
)
def test_what_cannot_be(arguments: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        _of(8, *arguments, **options)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(zoo.build("gpt2", layers=4), ((), zoo.inputs("gpt2")), tp=2)


def test_one_stage_is_the_whole_model(found: Plan) -> None:
    (stage,) = found.pipeline(1, 3).stages
    assert stage.activation_bytes == found.activation_bytes
    trained = sum(size.numel for size in found.parameters.values())
    assert stage.state_bytes == 18 * trained
    assert sum(size.num_bytes for size in found.parameters.values()) == found.parameter_bytes
    assert stage.microbatch_us == pytest.approx(found.step_us, rel=0.05)  # but for one all-reduce


def test_stages_of_a_model(found: Plan) -> None:
    split = found.pipeline(2, 4)
    first, last = split.stages
    assert first.chunks[0][1:] == ("transformer.h.0", "transformer.h.1")
    tied = found.parameters["transformer.wte.weight"].numel
    whole = sum(size.numel for size in found.parameters.values())
    assert first.parameters + last.parameters == whole + tied
    data = json.loads(split.to_json())
    assert data["stages"][0]["total_bytes"] == first.total_bytes
    assert "2 pipeline stages of 1 chunk, 4 microbatches; bubble 25.0 %" in str(split)


def test_timeline(found: Plan) -> None:
    phases = Counter(moment.phase for moment in found.timeline)
    assert phases == {"forward": len(found.calls), "backward": len(found.calls)}
    assert max(moment.num_bytes for moment in found.timeline) == found.activation_peak_bytes
    assert found.to_dict()["timeline"][0]["phase"] == "forward"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page(found: Plan, tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    found.to_html(target)
    reader = _Reader()
    reader.feed(target.read_text())
    assert reader.tags["rect"] == len(found.timeline)
    assert reader.tags["script"] == 0
    assert reader.links == []
    for block in found.blocks:
        for tensor in block.kept:
            assert tensor.name in reader.text
    for line in found.notes:
        assert line in reader.text
