"""compile(verify=True): a program whose numbers are wrong is refused before its first step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

import sp_compiler
from sp_compiler import ArgumentError, PassError, compiler
from sp_compiler.codegen import expressions
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.options import CompileOptions
from sp_compiler.rules.custom import UNPROVEN
from sp_compiler.verification import judge, proof
from sp_compiler.verification.proof import prove, prove_rules
from sp_compiler.verification.report import Comparison
from sp_compiler.verification.verify import Step
from tests.helpers.ranks import run_on_ranks
from tests.helpers.slow import slow
from tests.models import zoo

aten = torch.ops.aten
_OPTIONS = CompileOptions(tp=2)


def _model(name: str = "plain", layers: int = 1) -> nn.Module:
    return zoo.build(name, layers=layers, dropout=0.1, dtype=torch.float32)


def _prove(model: nn.Module, kwargs: dict[str, Any], open_dims: bool = False) -> None:
    compiled = build(model, (), kwargs, _OPTIONS, keep="unsharded", open_dims=open_dims)
    prove(Step.of(model, (), kwargs), _OPTIONS, compiled)
    assert compiled.unsharded is None


@pytest.mark.parametrize(("open_dims", "device"), [(False, "cpu"), slow(True, "meta")])
def test_right_programs_pass(open_dims: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> None:
        pytest.fail("two more runs of everything for noise floors, which only wrong programs need")

    monkeypatch.setattr(judge, "OtherRounding", measured)
    model = _model().to(device).bfloat16()
    _prove(model, zoo.inputs("plain"), open_dims)


def test_one_block_that_the_quick_check_doubts_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the others are: rounding may exceed what it allows for without noise floors."""
    quick, doubted = proof._quick_rows, []

    def doubting(*args: Any) -> list[Comparison]:
        *rows, last = quick(*args)
        doubted.append(replace(last, error=1.0))
        assert not doubted[0].ok
        assert all(row.ok for row in rows)
        return [*rows, *doubted]

    monkeypatch.setattr(proof, "_quick_rows", doubting)
    _prove(_model(), zoo.inputs("plain"))
    assert doubted


def test_parameters_without_memory_are_left_alone() -> None:
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    _prove(model, zoo.inputs("plain"))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.slow
def test_a_layer_that_was_merged_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single blocks are right, the model is not: two layers differ in one constant."""
    original = compiler.outline

    def merged(captured: Any, *rest: Any, **options: Any) -> Any:
        for node in captured.module.graph.nodes:
            if node.target is aten.layer_norm.default and "blocks.1" in str(
                node.meta["nn_module_stack"]
            ):
                node.args = (*node.args[:4], 0.5, *node.args[5:])
        captured.module.recompile()
        return original(captured, *rest, **options)

    monkeypatch.setattr(compiler, "outline", merged)
    with pytest.raises(PassError, match="outline") as refused:
        _prove(_model(layers=2), zoo.inputs("plain"))
    assert refused.value.pass_name == "outline"


@pytest.mark.slow
def test_a_wrong_printer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expressions.INFIX, aten.add.Tensor, "-")
    with pytest.raises(PassError) as refused:
        _prove(_model(), zoo.inputs("plain"))
    assert refused.value.pass_name == "codegen"
    assert "noise floor" in str(refused.value)


class _Doubling:
    """A code of which one function returns twice what it should, or raises."""

    def __init__(self, code: Any, function: str, result: int | None = None) -> None:
        self._code, self._function, self._result = code, function, result

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._code, name)
        return function if name != self._function else functools.partial(self._doubled, function)

    def _doubled(self, function: Callable[..., Any], *args: Any) -> Any:
        results = function(*args)
        if self._result is None:
            return tree_map_only(Tensor, lambda value: 2 * value, results)
        outputs, saved = results
        outputs = [2 * x if i == self._result else x for i, x in enumerate(outputs)]
        return tuple(outputs), saved


@functools.cache
def _compiled(name: str) -> CompiledProgram:
    # In float64 this small Llama recomputes one layer ahead.
    model = zoo.build(name, dropout=0.1)
    return build(model, (), zoo.inputs(name), _OPTIONS, keep="unsharded")


def _prove_wrong(name: str, region: str, function: str, result: int | None = None) -> PassError:
    """The error of a program of which one function is wrong."""
    compiled = replace(_compiled(name))
    codes = {**compiled.codes, region: _Doubling(compiled.codes[region], function, result)}
    compiled.codes = cast(Any, codes)
    step = Step.of(zoo.build(name, dropout=0.1), (), zoo.inputs(name))
    with pytest.raises(PassError, match="verify=True") as refused:
        prove(step, _OPTIONS, compiled)
    return refused.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("region", "function"),
    [
        ("Epilogue", "backward"),
        ("Epilogue", "loss_backward"),
        *[
            ("LlamaDecoderLayer", each)
            for each in ("backward", "recompute", "backward_rest", "backward_ahead")
        ],
    ],
)
def test_every_function_that_a_step_may_run(region: str, function: str) -> None:
    """A step runs the backward from the loss alone, and those of layers in a row."""
    wrong = _prove_wrong("llama", region, function)
    assert wrong.pass_name == "codegen"
    assert "gradient of" in str(wrong)


@pytest.mark.slow
def test_code_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one more wrong result, with the pass that wrote it."""

    def raises(*args: Any) -> Any:
        raise NameError("name 'nowhere' is not defined")

    monkeypatch.setattr(_Doubling, "_doubled", raises)
    wrong = _prove_wrong("llama", "Prologue", "forward")
    assert wrong.pass_name == "codegen"
    assert "NameError: name 'nowhere' is not defined" in str(wrong)


class _AlsoReturned(nn.Module):
    """A model that returns what its last layer reads, so that a block returns it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.blocks[0](x.sin())
        first = self.blocks[1](hidden).cos()
        return self.blocks[2](first).exp().mean(), first


def test_an_output_that_is_returned_apart() -> None:
    args = (torch.randn(2, 8, 16),)
    compiled = build(_AlsoReturned(), args, {}, _OPTIONS, keep="unsharded")
    ref = compiled.program.outputs[1]
    name = compiled.program.calls[ref.index].region.name
    wrong: Any = _Doubling(compiled.codes[name], "forward", ref.output)
    compiled.codes = {**compiled.codes, name: wrong}
    with pytest.raises(PassError, match="codegen"):
        prove(Step.of(_AlsoReturned(), args, {}), _OPTIONS, compiled)


@torch.library.custom_op("proof_test::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


center.register_fake(torch.empty_like)
center.register_autograd(lambda ctx, grad: center(grad))


@torch.library.custom_op("proof_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: twice(grad))


class Between(nn.Module):
    """An operator between two linear layers."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operator(self.up(x)))


def _prove_rules(model: nn.Module) -> None:
    args = (torch.randn(2, 8, 16),)
    prove_rules(Step.of(model, args, {}), _OPTIONS, build(model, args, {}, _OPTIONS))


def test_a_users_rule_is_compared_at_its_first_use() -> None:
    sp_compiler.rule(center, "...h -> ...h", linear="x")
    with pytest.raises(PassError, match="proof_test::center"):
        _prove_rules(Between(center))
    assert "proof_test::center" in UNPROVEN


def test_a_rule_is_proven_by_a_use_that_shards() -> None:
    """A replicated call says nothing about its rule."""
    sp_compiler.rule(twice, "...h -> ...h", whole="h")
    _prove_rules(Between(twice))
    assert "proof_test::twice" in UNPROVEN
    sp_compiler.rule(twice, "...h -> ...h", linear="x")
    _prove_rules(Between(twice))
    assert "proof_test::twice" not in UNPROVEN


class Rooted(nn.Module):
    """Takes the root and the logarithm of parameters, which random numbers may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16) / 2 + 0.25)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale.sqrt() + (1 - self.scale).log()))


@pytest.mark.parametrize("broken", [False, True])
def test_parameters_of_which_not_every_number_will_do(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """A NaN on both sides would be equal to anything."""
    if broken:
        monkeypatch.setitem(expressions.INFIX, aten.add.Tensor, "-")
    args = (torch.randn(2, 8, 16),)
    compiled = build(Rooted(), args, {}, _OPTIONS, keep="unsharded")
    with pytest.raises(PassError) if broken else contextlib.nullcontext():
        prove(Step.of(Rooted(), args, {}), _OPTIONS, compiled)


class Undefined(nn.Module):
    """Takes a root that no random numbers have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 20)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale - 10).sqrt()


@pytest.mark.slow
def test_what_is_nan_whatever_the_parameters_is_said() -> None:
    args = (torch.randn(2, 4),)
    compiled = build(Undefined(), args, {}, _OPTIONS, keep="unsharded")
    with pytest.warns(UserWarning, match="random parameters give NaN in Model, .* not compared"):
        prove(Step.of(Undefined(), args, {}), _OPTIONS, compiled)


@pytest.mark.slow
def test_layers_that_are_equal_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a proof does not grow with the depth of the model.

    The first layer is no exception: it reads a dropout that normalization replaced, and a mask that
    the capture does not have, from a call whose other results are compared with the capture.
    """
    rows: list[Any] = []
    original = proof.check_sections

    def counted(*args: Any) -> Any:
        compared = list(original(*args))
        rows.extend(compared)
        return compared

    monkeypatch.setattr(proof, "check_sections", counted)
    subjects = []
    for layers in (3, 5):
        rows.clear()
        _prove(_model("gpt2", layers=layers), zoo.inputs("gpt2"))
        subjects.append([row.subject for row in rows])
    assert subjects == 2 * [["Prologue", "GPT2Block", "Epilogue"]]


@pytest.mark.slow
def test_a_gradient_that_normalization_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of every part is right."""
    original = compiler.outline

    def detached(captured: Any, *rest: Any, **options: Any) -> Any:
        graph = captured.module.graph
        node = next(n for n in graph.nodes if n.target is aten.layer_norm.default)
        with graph.inserting_after(node):
            copy = graph.call_function(aten.detach.default, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        captured.module.recompile()
        return original(captured, *rest, **options)

    monkeypatch.setattr(compiler, "outline", detached)
    with pytest.raises(PassError, match="gradient of") as refused:
        _prove(_model(), zoo.inputs("plain"))
    assert refused.value.pass_name == "outline"


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="verify=1"):
        sp_compiler.compile(nn.Linear(4, 4), tp=1, verify=1)  # type: ignore[arg-type]


def _ten_times(module: GraphModule) -> int:
    """A user's pass that takes ``mul(x, 3)`` for ``mul(x, 30)``."""
    found = list(module.graph.find_nodes(op="call_function", target=aten.mul.Tensor))
    for node in found:
        node.args = (node.args[0], 30)
    return len(found)


class _Triple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 3


@pytest.mark.parametrize(
    "early", [slow(True), False], ids=["with example_inputs", "at the first call"]
)
def test_compile_refuses_before_the_first_step(early: bool) -> None:
    """Only where it was asked to: without ``verify`` the wrong pass is taken at its word."""
    model, x = _Triple(), torch.ones(2, 4)
    expected = 10 * model(x)
    wrong = sp_compiler.compile(model, tp=1, passes=[_ten_times])
    torch.testing.assert_close(wrong(x), expected)
    example: dict[str, Any] = {"example_inputs": ((x,), {})} if early else {}
    with pytest.raises(PassError, match=r"verify=True[\s\S]*_ten_times"):
        sp_compiler.compile(_Triple(), tp=1, passes=[_ten_times], verify=True, **example)(x)
    sp_compiler.compile(_Triple(), tp=1, verify=True, **example)(x)


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
