"""verify(): right models pass, and a pass that was broken on purpose is found and named."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from sp_compiler import compiler
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.pass_report import Pass, report_lines
from sp_compiler.base.placement import I, P, Placement, R
from sp_compiler.codegen import expressions
from sp_compiler.passes.sharding import problem
from sp_compiler.passes.sharding.rewrite import RegionLowering
from sp_compiler.rules.strategies import Strategy
from sp_compiler.verification import verify as verification
from sp_compiler.verification.simulate import SimulatedStep, simulate_step
from sp_compiler.verification.verify import VerifyReport, verify
from tests.helpers.dynamo import Net, random_ids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.slow import slow
from tests.models import zoo

aten = torch.ops.aten


def _verify(name: str, p: float = 0.0, seq: int = 12, tp: int = 2, **options: Any) -> VerifyReport:
    model = zoo.build(name, dropout=p, layers=1, dtype=torch.float32)
    given = zoo.inputs(name, 2, seq)
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in given.items()}
    return verify(model, ((), inputs), tp=tp, **options)


def _of_net(p: float = 0.0, **options: Any) -> VerifyReport:
    """Of blocks of two products, which take less time than real layers."""
    torch.manual_seed(0)
    return verify(Net(p), ((random_ids(), random_ids()), {}), tp=2, **options)


@pytest.mark.parametrize(
    ("name", "p", "seq", "options"),
    [
        slow("plain", 0.1, 12, {}),
        ("plain", 0.1, 13, {"dropout": "stored", "recompute": "none"}),  # padded rows
        slow("plain_logits", 0.0, 12, {"sequence_parallel": False, "recompute": "full"}),
        slow("gpt2", 0.1, 12, {"recompute": "attention"}),
    ],
)
def test_right_models_pass(name: str, p: float, seq: int, options: dict[str, Any]) -> None:
    report = _verify(name, p, seq, **options)
    assert report.ok, str(report)
    assert report.first_bad_pass is None
    assert report.worst < 1e-10
    assert {row.subject for row in report.table} >= {"model", "Prologue", "Epilogue"}
    stages = [row.stage for row in report.table if row.subject == "model"]
    assert stages == ["export", "normalize", "outline", "shard", "partition", "overlap", "codegen"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit", "lora"])
def test_right_models_of_other_kinds_pass(name: str) -> None:
    report = _verify(name, 0.1, 13)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("argument", [{}, {"use_cache": True}])
def test_a_model_that_would_return_a_cache(argument: dict[str, bool]) -> None:
    """As HuggingFace's are by default: the cache is left out on both sides, and that is said."""
    model = zoo.build("gpt2", layers=1, dtype=torch.float32)
    model.config.use_cache = True
    with pytest.warns(UserWarning, match="keeps no cache") as said:
        report = verify(model, ((), {**zoo.inputs("gpt2"), **argument}), tp=2)
    assert report.ok, report
    assert model.config.use_cache is True
    assert {warning.filename for warning in said} == {__file__}


class _States(nn.Module):
    """Returns what its layers made, and writes a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh())
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = states[-1][:, :-1]
        return [*states, shifted]


def test_a_model_that_returns_states_and_writes_slices() -> None:
    torch.manual_seed(0)
    report = verify(_States(), ((torch.randn(4, 6, 8),), {}), tp=2)
    assert report.ok, str(report)


class _Scaled(nn.Module):
    """Has a tensor that is neither parameter nor buffer, as rotary embeddings may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


def test_a_model_with_a_tensor_as_attribute_is_verified_in_float64() -> None:
    report = verify(_Scaled(), ((torch.randn(2, 4, 8),), {}), tp=2)
    assert report.ok, str(report)
    assert report.precision == "float64"
    assert "-0" not in str(report).replace("e-0", "")


def test_model_and_randomness_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model, ids = Net(0.1), random_ids()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert verify(model, ((ids, ids), {})).ok
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    assert not dist.is_initialized()


@pytest.mark.slow
def test_beside_a_default_group_of_another_size() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert _of_net().ok
        assert dist.group.WORLD is group
    finally:
        dist.destroy_process_group()


def _verified_on_a_rank() -> bool:
    return _of_net(0.1).ok and dist.get_world_size() == 2


@pytest.mark.slow
def test_on_two_real_ranks() -> None:
    assert run_on_ranks(2, _verified_on_a_rank) == [True, True]


def _without(dropped: Callable[[Placement, Placement], bool]) -> Callable[..., Node]:
    """``RegionLowering._convert`` that leaves some conversions out, keeping shapes right."""
    original = RegionLowering._convert

    def convert(self: RegionLowering, value: Any, source: Placement, target: Placement) -> Node:
        if not dropped(source, target):
            return original(self, value, source, target)
        # Without the sum, what is left of P -> S is a slice; of I -> R nothing is.
        whole = self.made[value][source]
        return self._convert_node(whole, value, R, target) if target.is_sharded else whole

    return convert


def _sharded_at_any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the typing refuses is not run replicated instead."""
    monkeypatch.setattr(compiler, "refused_operator", lambda *_: None)


def test_a_dropped_reduction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = _without(lambda a, b: a == P and b.is_sharded)
    _sharded_at_any_rate(monkeypatch)
    monkeypatch.setattr(RegionLowering, "_convert", dropped)
    report = _of_net()
    assert not report.ok
    assert report.first_bad_pass == "shard"
    bad = {row.subject for row in report.table if not row.ok}
    assert {"Block", "model"} <= bad
    assert report.table[3].stage == "check"  # the typing refuses it too
    assert "WRONG since pass 'shard'" in str(report)
    (block,) = [row for row in report.table if row.subject == "Block" and row.stage == "shard"]
    assert ".down, " in block.operator, "the first product that is summed"


def test_a_dropped_i_to_r_is_found_though_the_loss_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _sharded_at_any_rate(monkeypatch)
    monkeypatch.setattr(RegionLowering, "_convert", _without(lambda a, b: (a, b) == (I, R)))
    report = _of_net(sequence_parallel=False)
    assert not report.ok
    assert report.first_bad_pass == "shard"
    (row,) = [row for row in report.table if row.subject == "Block" and row.stage == "shard"]
    assert not row.ok
    assert "gradient" in row.where or "replicated value differs" in row.message
    assert row.operator.startswith("backward of ")


@pytest.mark.slow
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup in a part of the vocabulary taken for the whole embedding."""
    original = problem.vocabulary_strategies

    def wrong(node: Node, world_size: int, is_feature: Callable[[int], bool]) -> list[Strategy]:
        found = original(node, world_size, is_feature)
        return [replace(s, results=(I,)) if s.results == (P,) else s for s in found]

    _sharded_at_any_rate(monkeypatch)
    monkeypatch.setattr(problem, "vocabulary_strategies", wrong)
    report = _verify("plain")
    assert report.first_bad_pass == "shard"
    assert not report.ok
    assert "Prologue" in {row.subject for row in report.table if not row.ok}
    assert (report.first_bad_operator or "").startswith("vocab_embedding.default of ")
    assert "&lt;b&gt;BAD&lt;/b&gt;" in report._repr_html_()


def test_a_broken_normalization_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiler.normalize

    def broken(captured: Any, dropout: Any) -> None:
        original(captured, dropout=dropout)
        for node in captured.module.graph.nodes:
            if node.target is aten.layer_norm.default:
                node.args = (*node.args[:4], 0.5, *node.args[5:])
        captured.module.recompile()

    monkeypatch.setattr(compiler, "normalize", broken)
    report = _of_net()
    assert report.first_bad_pass == "normalize"
    assert [row.stage for row in report.table if not row.ok][:2] == ["normalize", "outline"]


@pytest.fixture
def _broken_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiler.simplify

    def broken(graph: Any) -> None:
        original(graph)
        for node in graph.nodes:
            if node.target is aten.gelu_backward.default:
                node.args = (node.args[0], node.args[0])

    monkeypatch.setattr(compiler, "simplify", broken)


class _WithPart(nn.Module):
    """Returns another scalar before its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"part": y.abs().mean(), "loss": F.gelu(y).square().mean()}


@pytest.mark.usefixtures("_broken_gelu")
def test_gradients_are_those_of_the_loss() -> None:
    report = verify(_WithPart(), ((torch.randn(2, 4),), {}), tp=2)
    (model,) = [r for r in report.table if (r.stage, r.subject) == ("codegen", "model")]
    assert not model.ok


@pytest.mark.slow
@pytest.mark.usefixtures("_broken_gelu")
def test_a_broken_simplification_is_found() -> None:
    report = _of_net()
    assert report.first_bad_pass == "simplify"
    bad = {(row.stage, row.subject) for row in report.table if not row.ok}
    assert bad == {
        (stage, subject)
        for stage in ("simplify", "tag", "partition", "overlap", "codegen")
        for subject in ("model", "Block")
    }
    (worst,) = [r for r in report.table if (r.stage, r.subject) == ("codegen", "Block")]
    assert worst.where.startswith("gradient of")


def test_a_broken_printer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expressions.INFIX, aten.add.Tensor, "-")
    report = _of_net()
    assert report.first_bad_pass == "codegen"


@pytest.mark.parametrize(("factor", "ok"), [(1 + 1e-8, False), slow(1 + 1e-13, True)])
def test_errors_far_above_rounding_are_found(
    factor: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tolerance that grew would let small mistakes through: a wrong eps, a missing row."""

    def scaled(*args: Any, **options: Any) -> SimulatedStep:
        step = simulate_step(*args, **options)
        grads = {name: None if g is None else g * factor for name, g in step.grads.items()}
        return replace(step, grads=grads)

    monkeypatch.setattr(verification, "simulate_step", scaled)
    report = _of_net()
    assert report.ok is ok, str(report)
    assert report.first_bad_pass == (None if ok else "shard")


@pytest.mark.parametrize(("factor", "ok"), [(1 + 1e-8, False), (1 + 1e-13, True)])
def test_gradients_of_inputs_are_compared_too(
    factor: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(*args: Any, **options: Any) -> SimulatedStep:
        step = simulate_step(*args, **options)
        grads = [None if grad is None else grad * factor for grad in step.input_grads]
        return replace(step, input_grads=grads)

    monkeypatch.setattr(verification, "simulate_step", scaled)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), torch.randn(2, 4, 8)
    report = verify(model, ((x.requires_grad_(),), {}), tp=2)
    assert report.ok is ok, str(report)


def test_report_is_data_too(tmp_path: Path) -> None:
    report = _of_net()
    data = json.loads(report.to_json())
    assert data["ok"] is True
    assert data["first_bad_pass"] is None
    assert len(data["table"]) == len(report.table)
    report.to_html(tmp_path / "verify.html")
    shown = (tmp_path / "verify.html").read_text(encoding="utf-8")
    assert shown.count("<tr>") == 1 + len(report.table)
    assert "BAD" not in shown
    assert f'srcdoc="{html.escape(shown)}"' in report._repr_html_()
    lines = list(report_lines(report.passes))  # and what each declined
    assert str(report).count("\n") == len(report.table) + 1 + len(lines)
    # For pipelines alone, on a GPU, and where it is asked for.
    elsewhere = {Pass.LOSS_ONLY, Pass.SPLIT_BACKWARD, Pass.FUSE_ATTENTION}
    asked_for = {Pass.EXPERT_PARALLEL, Pass.HALF_BATCHES, Pass.ASYNC_TP}
    ran = [name for name in Pass if name not in elsewhere | asked_for]
    assert [report["name"] for report in data["passes"]] == ran


def test_arguments() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match="meta"):
        verify(model, ((torch.zeros(2, 4),), {}))
    with pytest.raises(ArgumentError, match="args, kwargs"):
        verify(nn.Linear(4, 4), torch.zeros(2, 4))  # type: ignore[arg-type]


class _Silent(nn.Module):
    """Computes, and returns a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, int]:
        return {"rows": len(self.linear(x))}


def test_a_model_that_returns_no_tensor_is_not_called_right() -> None:
    with pytest.raises(ArgumentError, match=r"_Silent returns no tensor.*nothing to compare"):
        verify(_Silent(), ((torch.zeros(2, 4),), {}))


class _Loss(nn.Module):
    """Returns a loss, and what it is computed from, one number of which is never defined."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.pow(2).mean(), torch.cat([y.flatten(), y.new_full((1,), torch.nan)])


def test_a_model_whose_loss_is_nan_is_not_called_right() -> None:
    """NaN on both sides is equal, and so were all gradients of such a loss."""
    x = torch.ones(2, 4)
    x[0, 0] = torch.nan  # outputs of the other row are numbers
    with pytest.raises(ArgumentError, match=r"_Loss has no gradient with a finite value.*nothing"):
        verify(_Loss(), ((x,), {}))


@pytest.mark.slow
def test_a_number_that_is_nan_beside_a_loss_is_no_error() -> None:
    assert verify(_Loss(), ((torch.ones(2, 4),), {})).ok
