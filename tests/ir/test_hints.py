"""Placements that users pin or forbid: keys that match, that they are honored, refusals."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import sp_compiler
from sp_compiler import ArgumentError
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.hints import Hint, parameters_of, wishes_of
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.torch_compile.backend import sp_compiler_backend
from sp_compiler.trace.export import capture
from tests.helpers.parity import case, gradient_error, output_error, simulate
from tests.helpers.slow import slow
from tests.models import zoo

Hints = dict[str, Hint]
UP, DOWN = "blocks.{}.mlp.up.weight", "blocks.{}.mlp.down.weight"


def _compiled(name: str, hints: Hints, tp: int = 2) -> CompiledProgram:
    options = CompileOptions(tp=tp, hints=hints)
    program = to_program(_capture(name), options)
    return Compilation(program, options).finish(options)


def _capture(name: str) -> Captured:
    """With casts to float32 lifted, as the reference has them; what follows rewrites a copy."""
    return _captured(name).copy()


@functools.cache
def _captured(name: str) -> Captured:
    return capture(zoo.build(name), (), zoo.inputs(name), lift_casts=True)


def _stored(name: str, hints: Hints, tp: int = 2) -> dict[str, str]:
    options = CompileOptions(tp=tp, hints=hints)
    sharded = shard(to_program(_capture(name), options), options)
    return {key: str(p) for key, p in sharded.param_placements.items()}


def test_without_hints_the_pairs_are_column_and_row() -> None:
    found = _stored("plain_unfused", {})
    assert (found[UP.format(0)], found[DOWN.format(0)]) == ("S(0)", "S(1)")


@pytest.mark.parametrize("tp", [2, slow(4)])
@pytest.mark.parametrize(
    "hints",
    [
        slow({"blocks.*.mlp.up": Shard(1)}),
        slow({"blocks.*.mlp.up": Replicate(), "blocks.*.mlp.down": Replicate()}),
        slow({"blocks.0.mlp.down": Shard(0), "blocks.*.attention.query": Shard(-1)}),
        slow({"blocks.*.attention.key": Replicate(), "blocks.*.attention.query": Shard(0)}),
        {"head": sp_compiler.forbid(Shard(0)), "token_embedding": Shard(1)},
    ],
    ids=["row", "replicated", "one layer", "key", "vocabulary"],
)
def test_pinned_placements_are_met_and_gradients_right(hints: Hints, tp: int) -> None:
    true, compiled = case("plain_unfused", 2, 12), _compiled("plain_unfused", hints, tp)
    step = simulate(true, compiled)
    assert output_error(step, true) < 1e-11
    assert gradient_error(step.grads, true.grads) < 1e-10
    for name, wish in wishes_of(hints, parameters_of(zoo.build("plain_unfused"))).items():
        assert wish.allows(compiled.param_placements[name]), name


def test_a_hint_that_does_not_divide_is_met_by_padding() -> None:
    hints: Hints = {"position_embedding": Shard(1), "blocks.*.attention.key": Shard(0)}
    true, compiled = case("plain_unfused", 2, 12), _compiled("plain_unfused", hints, 3)
    assert compiled.param_placements["position_embedding.weight"].padding(3) == 1
    step = simulate(true, compiled)
    assert output_error(step, true) < 1e-11
    assert gradient_error(step.grads, true.grads) < 1e-10


@pytest.mark.slow
def test_verify_takes_hints() -> None:
    hints: Hints = {"blocks.*.mlp.up": Shard(1)}
    model, inputs = zoo.build("plain", layers=1), zoo.inputs("plain")
    report = sp_compiler.verify(model, ((), inputs), tp=2, hints=hints)
    assert report.ok, report


def test_of_a_fused_dim_each_part_is_sharded() -> None:
    found = _stored("gpt2", {"transformer.h.*.attn.c_attn": Shard(1)})
    assert found["transformer.h.0.attn.c_attn.weight"] == "S(1|32,32,32)"


def test_tied_parameters_are_pinned_under_any_name() -> None:
    assert _stored("gpt2", {"lm_head": Shard(1)})["transformer.wte.weight"] == "S(1)"


def test_layers_with_other_hints_are_other_blocks() -> None:
    def blocks(hints: Hints) -> list[tuple[str, ...]]:
        captured = capture(zoo.build("plain", layers=4), (), zoo.inputs("plain"))
        program = to_program(captured, CompileOptions(tp=2, hints=hints))
        paths = [tuple(program.paths(region)) for region in program.regions]
        return [layers for layers in paths if layers[0]]

    alike = tuple(f"blocks.{layer}" for layer in range(4))
    assert blocks({"blocks.*.mlp.up": Shard(1)}) == [alike]
    assert blocks({f"blocks.{i}.mlp.up": Shard((-1, 1)[i % 2]) for i in range(4)}) == [alike]
    assert blocks({"blocks.2.mlp.up": Shard(1)}) == [(*alike[:2], alike[3]), alike[2:3]]


class _Named(nn.Module):
    """A weight, a bias and a parameter with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(11))
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("layers.*", 11),
        ("layers.*.weight", 11),
        ("layers.*.*", 22),
        ("layers.?.bias", 10),
        ("layers.[02]", 2),
        ("layers.10", 1),
        ("scale", 1),
        ("*", 2),
        ("unused", 1),
    ],
)
def test_what_a_pattern_matches(pattern: str, count: int) -> None:
    assert len(wishes_of({pattern: Replicate()}, parameters_of(_Named()))) == count


@pytest.mark.parametrize("pattern", ["layers", "layers.*.wait", "*.weight.*", "Layers.0", "x"])
def test_what_matches_nothing_is_refused_with_what_is_near(pattern: str) -> None:
    with pytest.raises(ArgumentError, match=r"matches nothing.*name of a parameter") as caught:
        wishes_of({pattern: Shard(0)}, parameters_of(_Named()))
    assert repr(pattern) in str(caught.value)
    assert ("similar names: layers." in str(caught.value)) == (pattern not in ("*.weight.*", "x"))


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ([], "expected a dict of names"),
        (None, "expected a dict of names"),
        ({3: Shard(0)}, r"hints\[3\]: expected the name"),
        ({"": Shard(0)}, "expected the name"),
        ({"head": 0}, r"hints\['head'\]=0: expected Shard\(dim\), Replicate\(\)"),
        ({"head": "Shard(0)"}, r"expected Shard\(dim\)"),
        ({"head": Partial()}, r"Partial\(sum\): expected Shard\(dim\)"),
    ],
)
def test_bad_hints(hints: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        CompileOptions(tp=2, hints=hints)


@pytest.mark.parametrize("placements", [(), (0,), (Shard(0), "Replicate()")])
def test_forbid_takes_placements(placements: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"forbid\(.*\): expected one or more of Shard"):
        sp_compiler.forbid(*placements)


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"head": Shard(2)}, r"hints\['head'\]=Shard\(2\).*2 dims.*expected a dim from -2 to 1"),
        ({"head": Shard(0), "*.weight": Shard(-1)}, r"'head'\]=.*'\*.weight'.* contradict"),
        ({"head": Shard(0), "head.weight": sp_compiler.forbid(Shard(0))}, "drop one of them"),
        ({"head": sp_compiler.forbid(Shard(0), Shard(1), Replicate())}, "contradict"),
        (
            {"blocks.*.mlp_norm": sp_compiler.forbid(Replicate())},
            r"layer_norm.*mlp_norm.*needs dim 0 in full",
        ),
    ],
)
def test_what_cannot_be_met(hints: Hints, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        _compiled("plain_unfused", hints, 4)


class _Exponent(nn.Module):
    """exp(0) is not 0, so the weight cannot be padded with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


def test_a_hint_that_does_not_divide_is_refused() -> None:
    said = r"cannot be met on 3 ranks: .*\(8,\) can be Replicate\(\).*8 is not divisible by 3"
    with pytest.raises(ArgumentError, match=said):
        sp_compiler.plan(_Exponent(), ((torch.randn(4, 8),), {}), tp=3, hints={"scale": Shard(0)})


class _Gated(nn.Module):
    """Two parameters that one operator reads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(size, size))
        self.other = nn.Parameter(torch.randn(size, size))
        self.third = nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.one * self.other) @ self.third


def test_hints_that_one_operator_cannot_meet_together_are_named() -> None:
    hints: Hints = {"third": Replicate(), "one": Shard(0), "other": Shard(1)}
    with pytest.raises(ArgumentError, match="cannot be met together on 2 ranks") as caught:
        sp_compiler.plan(_Gated(8), ((torch.randn(4, 3, 8),), {}), tp=2, hints=hints)
    assert "hints['one']=Shard(0) and hints['other']=Shard(1)" in str(caught.value)
    assert "third" not in str(caught.value)


def test_sizes_that_do_not_divide_are_padded_if_asked() -> None:
    args = (torch.randn(4, 3, 6),)
    plan = sp_compiler.plan(_Named(), (args, {}), tp=4, hints={"layers.3": Shard(0)})
    assert "layers.3.weight (6, 6) on 4 ranks: Shard(0)" in str(plan.explain("layers.3"))


def test_one_rank_meets_every_hint() -> None:
    assert set(_stored("plain", {"blocks.*.mlp.up": Shard(1)}, tp=1).values()) == {"I"}


def test_the_plan_shows_hints() -> None:
    hints: Hints = {"head": Replicate(), "blocks.0.mlp.up": sp_compiler.forbid(Shard(0))}
    model = zoo.build("plain_unfused")
    found = sp_compiler.plan(model, ((), zoo.inputs("plain_unfused")), tp=2, hints=hints)
    expected = {"head": "Replicate()", "blocks.0.mlp.up": "forbid(Shard(0))"}
    assert json.loads(found.to_json())["options"]["hints"] == expected
    assert any("hints['head']=Replicate()" in line for line in found.fallbacks)


def test_compile_refuses_before_it_takes_the_model_over() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match=r"matches nothing.*similar names: weight"):
        sp_compiler.compile(model, tp=1, hints={"weigth": Shard(0)})
    assert sp_compiler.compile(model, tp=1, hints={"weight": Shard(0)})(torch.randn(2, 4)).shape


def test_graphs_of_torch_compile_take_their_own_hints() -> None:
    options: Any = {"tp": 1, "hints": {"layers.3": Shard(0), "elsewhere": Shard(0)}}
    compiled = torch.compile(_Named(), backend=sp_compiler_backend, options=options)
    with pytest.warns(UserWarning, match="for 'elsewhere' match nothing in this graph.*layers.0.w"):
        compiled(torch.randn(2, 6))
