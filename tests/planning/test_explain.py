"""Why something is (not) sharded: costs are those of the problem, reasons are the true ones."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import sp_compiler
from sp_compiler import ArgumentError, NotCompiledError, Plan
from sp_compiler.base.placement import Placement
from sp_compiler.compiler import build, to_program
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.explain import stored_text
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.planning.placement_explanation import ParameterExplanation, Way
from sp_compiler.trace.export import capture
from tests.models import zoo

LAYER = "model.layers.{}."
PROJECTION, KEY = "self_attn.o_proj", "self_attn.k_proj"


@pytest.fixture(scope="module")
def llama() -> Plan:
    """Two kv heads on four ranks."""
    return sp_compiler.plan(zoo.build("llama"), ((), zoo.inputs("llama")), tp=4)


def _one(plan: Plan, name: str) -> ParameterExplanation:
    (found,) = plan.explain(name).parameters
    return found


def _ways(found: ParameterExplanation) -> list[tuple[Way, ...]]:
    return [found.stored, *(reader.ways for reader in found.operators)]


@pytest.mark.slow
def test_the_chosen_way_is_the_optimum(llama: Plan) -> None:
    found = _one(llama, LAYER.format(0) + PROJECTION)
    assert found.placement == "Shard(1)"
    assert found.shape == (32, 32)
    assert len(found.operators) == 1
    assert found.operators[0].num_calls == 2
    assert "aten.linear.default in model.layers.0.self_attn.o_proj" in found.operators[0].operator
    for ways in _ways(found):
        (chosen,) = [way for way in ways if way.chosen]
        assert (chosen.more_us, chosen.conversions) == (0.0, ())
        assert chosen.parameter_bytes == 32 * 32 * 8 / 4
        for way in ways:
            parts = way.communication_us + way.compute_us + way.memory_us
            assert way.more_us == pytest.approx(parts, abs=1e-6)
    (whole,) = [way for way in found.operators[0].ways if way.operands == ("R", "R")]
    assert whole.more_us > 0
    assert whole.parameter_bytes == 32 * 32 * 8
    assert "all-gather of reshape_5 in model.layers.0.self_attn (S(2) to R)" in whole.conversions[0]


@functools.cache
def _cost_us(hint: Any) -> float:
    hints = {f"model.layers.*.{PROJECTION}": hint} if hint is not None else {}
    options = CompileOptions(tp=4, hints=hints)
    captured = capture(zoo.build("llama"), (), zoo.inputs("llama"))
    return shard(to_program(captured, options), options).cost_us


@pytest.mark.slow
@pytest.mark.parametrize("hint", [Replicate(), Shard(0)])
def test_costs_are_those_of_pinning(llama: Plan, hint: Any) -> None:
    pinned = _cost_us(hint) - _cost_us(None)
    stored = _one(llama, LAYER.format(1) + PROJECTION + ".weight").stored
    text = "Replicate()" if isinstance(hint, Replicate) else "Shard(0)"
    (way,) = [way for way in stored if way.results == (text,)]
    assert way.more_us == pytest.approx(pinned, abs=1e-3)


def test_heads_that_do_not_divide(llama: Plan) -> None:
    found = _one(llama, LAYER.format(0) + KEY)
    assert found.placement == "Replicate()"
    assert "Shard(0) would cost" in found.reason
    assert "all-gather of k_proj in model.layers.0.self_attn.k_proj (S(2) to R)" in found.reason
    assert "has 2 x 8 along dim 2, and 2 is not divisible by 4" in found.reason


@pytest.mark.slow
def test_a_module_stands_for_all_parameters_inside(llama: Plan) -> None:
    def names(path: str) -> list[str]:
        return [item.name for item in llama.explain(path).parameters]

    assert names("model.norm") == ["model.norm.weight"]
    mlp = LAYER.format(0) + "mlp"
    assert names(mlp) == [f"{mlp}.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert names("model.layers.*.mlp.up_proj") == [
        LAYER.format(layer) + "mlp.up_proj.weight" for layer in range(2)
    ]
    assert names("model.*.weight") == names("model.embed_tokens") + names("model.norm")


def test_a_module_with_a_parameter_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    plan = sp_compiler.plan(nn.Sequential(Scaled()), ((torch.randn(2, 8),), {}), tp=2)
    found = [item.name for item in plan.explain("0").parameters]
    assert found == ["0.scale", "0.linear.weight", "0.linear.bias"]


class _Odd(nn.Module):
    """A size that does not divide, an operator without a rule, a weight that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.mixed = nn.Parameter(torch.ones(5, 7))
        self.scale = nn.Parameter(torch.ones(8, 8))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x), self.scale.renorm(2, 0, 1.0), torch.softmax(self.mixed.exp(), 1)


def _odd(tp: int, **hints: Any) -> Plan:
    return sp_compiler.plan(_Odd(), ((torch.randn(4, 3, 5),), {}), tp=tp, hints=hints)


def test_reasons_of_what_can_never_be_sharded() -> None:
    plan = _odd(2)
    mixed = _one(plan, "mixed").reason
    assert mixed.startswith("cannot be sharded: aten.exp.default (test_explain.py:")
    assert "has 5 along dim 0, and 5 is not divisible by 2" in mixed
    assert "has 7 along dim 1, and 7 is not divisible by 2" in mixed
    padded = _one(plan, "inner.weight").reason
    assert "Shard(0) with padding after 7" in padded
    scale = _one(plan, "scale")
    assert "there is no sharding rule for aten.renorm.default" in scale.reason
    assert [way.operands for way in scale.operators[0].ways] == [("I",)]
    assert _one(plan, "unused.weight").reason == "the forward does not use it"
    assert _one(_odd(1), "inner.weight").reason == "one rank holds everything"
    asked = _one(_odd(2, scale=Replicate()), "scale").reason
    assert asked == "asked for by hints['scale']=Replicate()"


@pytest.mark.slow
def test_placements_of_an_earlier_compilation() -> None:
    model, inputs, options = zoo.build("plain"), zoo.inputs("plain"), CompileOptions(tp=2)
    first = build(model, (), inputs, options)
    again = build(model, (), inputs, options, fixed=first.param_placements).plan
    assert "first compilation" in _one(again, "blocks.0.mlp.up.weight").reason


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("layers.0.self_attn.o_proj", "model.layers.0.self_attn.o_proj"),
        ("model.layers.0.mlp.act_fn", "model.layers.0.mlp"),
        ("lm_heat", "lm_head"),
    ],
)
def test_unknown_names_raise_with_what_is_near(llama: Plan, name: str, near: str) -> None:
    with pytest.raises(ArgumentError, match=r"expected the name of a parameter, or of a mod") as e:
        llama.explain(name)
    assert near in str(e.value)


@pytest.mark.parametrize("name", [3, None, ["lm_head"]])
def test_names_that_are_no_text_raise(llama: Plan, name: Any) -> None:
    message = re.escape(f"explain({name!r}): expected the name of a parameter, or of a module")
    with pytest.raises(ArgumentError, match=message):
        llama.explain(name)


def test_text_and_json(llama: Plan) -> None:
    found = llama.explain("lm_head")
    lines = str(found).splitlines()
    assert lines[0] == "lm_head.weight (128, 32) on 4 ranks: Shard(0)"
    assert lines[1].startswith("  the cheapest way; Replicate() would cost ")
    assert sum(line.startswith("    *  ") for line in lines) == 2
    data = json.loads(found.to_json())
    assert data["parameters"][0]["operators"][0]["ways"][0]["operands"] == ["R", "R"]


def test_copies_of_a_plan(llama: Plan) -> None:
    assert copy.deepcopy(llama).explain("lm_head").tp == 4
    with pytest.raises(NotCompiledError, match="another process"):
        pickle.loads(pickle.dumps(llama)).explain("lm_head")


def test_memory_is_not_told_as_a_time(llama: Plan) -> None:
    """Its price, which is seconds for a matrix, is for the solver alone."""
    text = str(llama.explain("lm_head"))
    assert "Replicate() would cost 24.00 KiB more on every rank" in text
    assert text.count("\nPlacements\n") == 1


def test_what_is_slower_than_a_copy_is_chosen_for_its_memory() -> None:
    """A column-parallel linear whose result is gathered at once: only memory speaks for it."""
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64))
    plan = sp_compiler.plan(model, ((torch.randn(2, 4, 32),), {}), tp=2)
    found = _one(plan, "0.weight")
    (copied,) = [way for way in found.stored if way.results == ("Replicate()",)]
    assert copied.communication_us + copied.compute_us < 0 < copied.memory_us
    words = (
        r"chosen for its memory; Replicate\(\) would cost 4\.00 KiB more on every rank and .* less"
    )
    assert re.match(words, found.reason), found.reason


@pytest.mark.parametrize(
    ("segments", "units", "text"),
    [
        ((), 0, "Shard(0)"),
        ((5,), 0, "Shard(0) with padding after 5"),
        ((64, 16, 16), 0, "Shard(0) in parts of 64, 16, 16"),
        ((8,) * 24, 0, "Shard(0) in 24 parts of 8"),
        ((6, 6), 3, "Shard(0) in parts of 6, 6 with padding after the 3 heads of each"),
    ],
)
def test_parts_are_listed_if_they_are_few(segments: tuple[int, ...], units: int, text: str) -> None:
    assert stored_text(Placement("S", 0, segments, units)) == text
