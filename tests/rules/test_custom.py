"""Rules that a user writes for operators of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import I, S
from sp_compiler.rules.registry import ROWS
from tests.helpers import parity
from tests.helpers.one_operator import check
from tests.helpers.operator_call import Call, Whole, offered

lib = torch.library


@lib.custom_op("rules_test::gate", mutates_args=())
def gate(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """silu(x) * y * scale: (..., h), (..., h), (h) to (..., h)."""
    return F.silu(x) * y * scale


@gate.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@lib.custom_op("rules_test::gate_backward", mutates_args=())
def gate_backward(
    grad: Tensor, x: Tensor, y: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and scale."""
    sigmoid = torch.sigmoid(x)
    slope = sigmoid * (1 + x * (1 - sigmoid))
    by_row = (grad * x * sigmoid * y).flatten(0, -2)
    return grad * y * scale * slope, grad * x * sigmoid * scale, by_row.sum(0)


@gate_backward.register_fake
def _(grad: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y), torch.empty_like(scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


gate.register_autograd(
    lambda ctx, grad: gate_backward(grad, *ctx.saved_tensors), setup_context=_save
)


@lib.custom_op("rules_test::project", mutates_args=())
def project(x: Tensor, weight: Tensor, gain: Tensor | None, scale: float) -> Tensor:
    """A linear layer whose backward is made of PyTorch's operators."""
    return F.linear(x, weight) * (scale if gain is None else gain * scale)


@project.register_fake
def _(x: Tensor, weight: Tensor, gain: Tensor | None, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save_project(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.gain, ctx.scale = inputs[2:]


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    grad = grad * (ctx.scale if ctx.gain is None else ctx.gain * ctx.scale)
    return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None, None


project.register_autograd(_project_backward, setup_context=_save_project)


@lib.custom_op("rules_test::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """Mixes the elements of a row; it is its own gradient."""
    return x - x.mean(-1, keepdim=True)


@center.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


center.register_autograd(lambda ctx, grad: center(grad))


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    rows = dict(ROWS)
    yield
    ROWS.clear()
    ROWS.update(rows)


class Model(nn.Module):
    """Two gated blocks and a loss."""

    def __init__(self, width: int = 16, inner: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, 24)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.scale = nn.Parameter(torch.randn(inner))
        self.down = nn.Parameter(torch.randn(width, inner))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = gate(center(self.gate(y)), self.up(y), self.scale)
        return x + project(y, self.down, None, 0.5)


def make_case() -> parity.Case:
    torch.manual_seed(0)
    return parity.make_case(Model().double(), inputs())


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 24, (2, 8), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def register() -> None:
    text = "...h, ...h, ...h, h -> ...h, ...h, h"
    sp_compiler.rule("rules_test::gate_backward", text, linear="grad")
    sp_compiler.rule(gate, "...h, ...h, h -> ...h")
    sp_compiler.rule(project, "...i, oi, o -> ...o", linear=["x", "weight"])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_model_is_sharded_through_its_own_operators(tp: int, sequence_parallel: bool) -> None:
    register()
    sp_compiler.rule(center, "...h -> ...h", whole="h", linear="x")
    program = parity.assert_parity(make_case(), tp=tp, sequence_parallel=sequence_parallel)
    placed = program.param_placements
    assert placed["blocks.0.up.weight"] == placed["blocks.1.up.weight"] == S(0)
    assert placed["blocks.0.scale"] == S(0)
    assert placed["blocks.0.down"] == S(1)


def test_without_a_rule_an_operator_runs_replicated_and_the_plan_says_so() -> None:
    program = parity.assert_parity(make_case(), tp=2)
    assert program.param_placements["blocks.0.down"] == I
    plan = sp_compiler.plan(Model(), ((), inputs()), tp=2)
    notes = [note for note in plan.fallbacks if "no sharding rule" in note]
    assert any("rules_test.gate.default" in note for note in notes)
    assert any("rules_test.project.default" in note for note in notes)


def test_a_backward_without_a_rule_is_named() -> None:
    sp_compiler.rule(gate, "...h, ...h, h -> ...h")
    sp_compiler.rule(project, "...i, oi, o -> ...o")
    program = parity.assert_parity(make_case(), tp=2)
    (note,) = {note for note in program.notes if "gate.default runs replicated" in note}
    assert "sp_compiler.rule('rules_test::gate_backward', ...)" in note


@pytest.mark.parametrize("whole", ["h", ""])
def test_verify_finds_a_rule_that_lies(whole: str) -> None:
    """A mean over a row says that rows may be cut: only numbers can tell."""
    register()
    sp_compiler.rule(center, "...h -> ...h", whole=whole, linear="x")
    report = sp_compiler.verify(Model(), ((), inputs()), tp=2)
    assert report.ok == (whole == "h")
    if report.ok:
        assert report.first_bad_operator is None
        return
    assert report.first_bad_pass == "shard"
    said = report.first_bad_operator or ""
    assert said.startswith("center.default of blocks.0, ")
    assert "test_custom.py:" in said
    assert f"wrong from here on: {said}" in str(report)
    assert json.loads(report.to_json())["first_bad_operator"] == said


def test_every_strategy_of_a_text() -> None:
    register()
    numbers = torch.randn(4, 6, 8, dtype=torch.float64)
    weight, gain = numbers[0, :4].clone(), numbers[0, 0, :4].clone()
    for target, args in {
        torch.ops.rules_test.gate.default: (numbers, numbers.flip(0), numbers[0, 0].clone()),
        torch.ops.rules_test.gate_backward.default: (
            *(numbers, numbers.flip(0), numbers.flip(1), numbers[0, 0].clone()),
        ),
        torch.ops.rules_test.project.default: (numbers, weight, gain, 0.5),
    }.items():
        whole = Whole.of(Call(target, args, {}))
        ways = offered(whole, 2)
        assert len(ways) >= 4
        for way in ways:
            check(whole, way, 2)


@pytest.mark.parametrize(
    ("op", "text", "options", "message"),
    [
        ("rules_test::nothing", "h -> h", {}, "op='rules_test::nothing' is not a registered"),
        ("gate", "h -> h", {}, "op='gate' is not a registered operator"),
        (3, "h -> h", {}, "op=3 is not a registered operator"),
        ("aten::add_", "h, h -> h", {}, "op='aten::add_' mutates an argument"),
        ("aten::hstack", "h -> h", {}, "op='aten::hstack' .* takes or returns a list of tensors"),
        (
            "aten::linear",
            "...i, oi, o -> ...o",
            {},
            "op='aten::linear' already has a built-in sharding rule.* drop this call, or",
        ),
        ("aten::add", "h, h -> h", {}, "op='aten::add' already has a built-in sharding rule"),
        (center, None, {}, "text=None: expected a str such as"),
        (center, "h -> h", {"whole": 1}, "whole=1: expected a str such as 'h'"),
        (center, "h -> h", {"linear": 3}, "linear=3: expected the name of an argument, or"),
        (center, "h -> h", {"linear": [1]}, r"linear=\[1\]: expected the name of an argument, or"),
        (center, "h -> h", {"linear": [(1,)]}, r"linear=\[\(1,\)\]: expected the name"),
        (center, "...h", {}, "text='...h' needs one '->'"),
        (center, "h -> h -> h", {}, "needs one '->'"),
        (center, "...h, h -> ...h", {}, "has 2 tensor arguments, but rules_test::center has 1: x"),
        (center, "...h -> h, h", {}, "has 2 results, but rules_test::center has 1"),
        (center, "h... -> h", {}, "'h...' for x is not letters"),
        (center, "hh -> h", {}, "'hh' for x is not letters, each once"),
        (center, "...h -> ...g", {}, "no operand has g, which a result has"),
        (center, "h -> ...h", {}, r"no operand has \.\.\., which"),
        (center, "...h -> ...h", {"whole": "g"}, "whole='g' names letters that text="),
        (center, "...h -> ...h", {"linear": "y"}, "linear='y' names no tensor argument .* has x"),
    ],
)
def test_errors(op: Any, text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sp_compiler.rule(op, text, **options)


def test_a_second_rule_replaces_the_first() -> None:
    """As when the cell of a notebook runs again."""
    for whole in ("h", ""):
        for op in (center, "rules_test::center"):
            sp_compiler.rule(op, "...h -> ...h", whole=whole, linear="x")
            ways = offered(Whole.of(Call(center._opoverload, (torch.randn(2, 8, 32),), {})), 2)
            assert any(way.results == (S(2),) for way in ways) == (whole == "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sh -> sh", r"x is sh, but has shape \(2, 8, 32\)"),
        ("...abcd -> ...abcd", r"x is ...abcd, but has shape \(2, 8, 32\)"),
        ("abc -> acb", "'c' has size 32, but 8 in result 0"),
    ],
)
def test_a_text_that_does_not_fit_a_call(text: str, message: str) -> None:
    sp_compiler.rule(center, text)
    with pytest.raises(ArgumentError, match=f"rule of op='rules_test::center', .*{message}"):
        parity.compiled(make_case(), tp=2)
