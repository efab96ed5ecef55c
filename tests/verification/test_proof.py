"""compile(verify=True): a program whose numbers are wrong is refused before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler import ArgumentError, PassError, compiler
from sp_compiler.codegen import expressions
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.rules.custom import UNPROVEN
from sp_compiler.verification.proof import prove, prove_rules
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

aten = torch.ops.aten
_OPTIONS = CompileOptions(tp=2)


def _model(name: str = "plain", **fields: Any) -> nn.Module:
    return zoo.build(name, dropout=0.1, dtype=torch.float32, **fields)


def _prove(model: nn.Module, kwargs: dict[str, Any], open_dims: bool = False) -> None:
    compiled = build(model, (), kwargs, _OPTIONS, keep="unsharded", open_dims=open_dims)
    prove(model, (), kwargs, _OPTIONS, compiled)
    assert compiled.unsharded is None


@pytest.mark.parametrize(("open_dims", "device"), [(False, "cpu"), (True, "meta")])
def test_right_programs_pass(open_dims: bool, device: str) -> None:
    model = _model().to(device).bfloat16()
    _prove(model, zoo.inputs("plain"), open_dims)


def test_parameters_without_memory_are_left_alone() -> None:
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    _prove(model, zoo.inputs("plain"))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_layer_that_was_merged_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single blocks are right, the model is not: two layers differ in one constant."""
    original = compiler.outline

    def merged(captured: Any, wishes: Any) -> Any:
        for node in captured.module.graph.nodes:
            if node.target is aten.layer_norm.default and "blocks.1" in str(
                node.meta["nn_module_stack"]
            ):
                node.args = (*node.args[:4], 0.5, *node.args[5:])
        captured.module.recompile()
        return original(captured, wishes)

    monkeypatch.setattr(compiler, "outline", merged)
    with pytest.raises(PassError, match="outline") as refused:
        _prove(_model(layers=2), zoo.inputs("plain"))
    assert refused.value.pass_name == "outline"


def test_a_wrong_printer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expressions.INFIX, aten.add.Tensor, "-")
    with pytest.raises(PassError) as refused:
        _prove(_model(), zoo.inputs("plain"))
    assert refused.value.pass_name == "codegen"
    assert "noise floor" in str(refused.value)


@torch.library.custom_op("proof_test::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


center.register_fake(torch.empty_like)
center.register_autograd(lambda ctx, grad: center(grad))


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(center(self.up(x)))


def test_a_users_rule_is_compared_at_its_first_use() -> None:
    model, args = Centered(), (torch.randn(2, 8, 16),)
    sp_compiler.rule(center, "...h -> ...h", linear="x")
    compiled = build(model, args, {}, _OPTIONS)
    with pytest.raises(PassError, match="proof_test::center"):
        prove_rules(model, args, {}, _OPTIONS, compiled)
    sp_compiler.rule(center, "...h -> ...h", whole="h", linear="x")
    assert "proof_test::center" in UNPROVEN
    prove_rules(model, args, {}, _OPTIONS, build(model, args, {}, _OPTIONS))
    assert "proof_test::center" not in UNPROVEN


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="verify=1"):
        sp_compiler.compile(nn.Linear(4, 4), tp=1, verify=1)  # type: ignore[arg-type]


def _compiled_on_a_rank() -> float:
    kwargs = zoo.inputs("plain")
    module = sp_compiler.compile(_model(), tp=2, example_inputs=((), kwargs), verify=True)
    torch.manual_seed(0)
    loss = module(**kwargs).loss
    loss.backward()
    return float(loss)


@pytest.mark.slow
def test_inside_a_process_group() -> None:
    first, second = run_on_ranks(2, _compiled_on_a_rank)
    assert first == second
