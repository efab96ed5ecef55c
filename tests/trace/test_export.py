"""Capture: the graph computes the same as the model, and errors say clearly when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.errors import CaptureError, UnsupportedError
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import is_call
from sp_compiler.ir.program import Ref
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.reference import ReferenceResult, run_captured
from tests.helpers.slow import slow
from tests.models import architectures, zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten


def run(captured: Captured, model: nn.Module, *args: Any, **kwargs: Any) -> ReferenceResult:
    leaves, spec = flatten_inputs(args, kwargs)
    assert spec == captured.in_spec
    buffers = dict(model.named_buffers())
    return run_captured(captured, dict(model.named_parameters()), buffers, leaves)


def test_inputs_that_were_made_for_inference() -> None:
    """Autograd records nothing of them, but the graph is for any input of their kind."""
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        x = torch.randn(4, 3)
    captured = capture(model, (x,), {})
    x = x.clone()
    assert torch.equal(run(captured, model, x).outputs[0], model(x))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_error(model: nn.Module, expected: Tensor, actual: Tensor) -> float:
    """Largest gradient error, relative to the largest gradient; the same ones must be absent."""
    wanted, got = gradients(model, expected), gradients(model, actual)
    assert {n for n, g in wanted.items() if g is None} == {n for n, g in got.items() if g is None}
    pairs = [(w, got[name]) for name, w in wanted.items() if w is not None]
    scale = max(float(w.abs().max()) for w, _ in pairs)
    return max(float((w - g).abs().max()) for w, g in pairs if g is not None) / scale


@pytest.mark.parametrize("name", zoo.cases("llama_logits", "encoder_seqfirst"))
def test_captured_zoo_equals_eager(name: str) -> None:
    model, kwargs = zoo.build(name), zoo.inputs(name)
    captured = capture(model, (), kwargs)
    loss = zoo.loss_of(run(captured, model, **kwargs).outputs)
    expected = zoo.loss_of(model(**kwargs))
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    assert largest_error(model, expected, loss) < 1e-14


@pytest.mark.parametrize("name", ["gpt2", "llama", slow("t5")])
def test_lifted_casts_leave_float64_alone(name: str) -> None:
    model, kwargs = zoo.build(name), zoo.inputs(name)
    captured = capture(model, (), kwargs, lift_casts=True)
    values = [node.meta["val"] for node in captured.module.graph.nodes if node.op != "output"]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    assert torch.float64 in dtypes
    assert torch.float32 not in dtypes
    expected = zoo.loss_of(model(**kwargs))
    loss = zoo.loss_of(run(captured, model, **kwargs).outputs)
    assert abs(float(loss - expected)) < 1e-6
    assert largest_error(model, expected, loss) < 1e-5


class _Scaled(nn.Module):
    """Multiplies by a tensor that is no buffer, which is a constant of the graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.scale = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_constants_are_lifted_too(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    captured = capture(_Scaled(dtype), (x,), {}, lift_casts=True)
    assert [constant.dtype for constant in captured.constants.values()] == [torch.float64]


def test_float32_model_is_not_lifted() -> None:
    model, kwargs = zoo.build("llama", dtype=torch.bfloat16), zoo.inputs("llama")
    captured = capture(model, (), kwargs, lift_casts=True)
    assert all(
        node.meta["val"].dtype is not torch.float64
        for node in captured.module.graph.nodes
        if node.op != "output"
    )


def test_every_node_says_what_it_computes() -> None:
    captured = capture(zoo.build("peft_llama"), (), zoo.inputs("peft_llama"))
    for node in captured.module.graph.nodes:
        if node.op == "output":
            continue
        assert isinstance(node.meta["requires_grad"], bool)
        assert node.meta["val"].device.type == "cpu"
        if node.op == "call_function":
            assert node.meta["nn_module_stack"]


def test_requires_grad_follows_frozen_parameters() -> None:
    captured = capture(zoo.build("lora"), (), zoo.inputs("lora"))
    first_norm = next(
        node for node in captured.module.graph.nodes if is_call(node, aten.layer_norm.default)
    )
    assert not first_norm.meta["requires_grad"]
    assert captured.outputs[0].meta["requires_grad"]


def test_tied_weights_are_one_placeholder_under_the_first_name() -> None:
    model = zoo.build("gpt2")
    captured = capture(model, (), zoo.inputs("gpt2"))
    assert captured.aliases == {"lm_head.weight": "transformer.wte.weight"}
    names = [ref.name for ref in captured.refs if ref.kind == "param"]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    model = zoo.build("plain")
    ids = zoo.inputs("plain")["input_ids"]
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    assert [ref.index for ref in captured.refs if ref.kind == "input"] == [0, 1]
    labels = zoo.inputs("plain", seed=1)["input_ids"]
    loss = run(captured, model, input_ids=ids, labels=labels).outputs[0]
    assert torch.equal(loss, model(ids, labels).loss)


def test_inputs_that_share_memory_are_two_inputs() -> None:
    class Next(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 - y

    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.add_(1) * y

    numbers, others = torch.randn(3, 5), torch.randn(3, 4)
    captured = capture(Next(), (), {"x": numbers[:, :-1], "y": numbers[:, 1:]})
    (result,) = run(captured, Next(), x=numbers[:, 1:], y=others).outputs
    assert torch.equal(result, numbers[:, 1:] * 2 - others)
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)writes into its input 'x'; only buffers may be written.*x\.add_",
    ):
        capture(Writes(), (numbers, numbers[:, :1]))


def test_keyword_arguments_come_in_any_order() -> None:
    class Subtract(nn.Module):
        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return a - scale * b

    a, b = torch.randn(3), torch.randn(3)
    captured = capture(Subtract(), (), {"scale": 3.0, "b": b, "a": a})
    (result,) = run(captured, Subtract(), a=a, b=b, scale=3.0).outputs
    assert torch.equal(result, a - 3 * b)


def test_meta_model_is_captured_on_the_cpu() -> None:
    with torch.device("meta"):
        model = zoo.build("plain")
    captured = capture(model, (), zoo.inputs("plain"))
    real = zoo.build("plain")
    kwargs = zoo.inputs("plain")
    assert torch.equal(run(captured, real, **kwargs).outputs[0], real(**kwargs)[0])


class Everything(nn.Module):
    """Buffers, constants, detached values and outputs of every kind."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(4))
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor, flag: bool = True) -> dict[str, Any]:
        hidden = self.linear(x) + self.constant
        with torch.no_grad():
            shift = self.frozen(hidden)
            with torch.enable_grad():
                shift = shift * self.linear.bias
        self.steps.add_(hidden.detach().mean(0))
        copy = hidden.clone()
        copy[:, 0] = 1.0
        return {"sum": copy + shift, "x": x, "weight": self.linear.weight, "n": 5, "flag": flag}


def test_buffers_constants_detach_and_odd_outputs() -> None:
    model = Everything().double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    captured = capture(model, (x,), {"flag": False})
    model.steps.zero_()
    result = run(captured, model, x, flag=False)
    assert captured.mutated == ["steps"]
    assert {ref.kind for ref in captured.refs} == {"param", "buffer", "constant", "input"}
    expected = model(x, flag=False)
    torch.testing.assert_close(result.mutated_buffers["steps"], model.steps)
    rebuilt = torch.utils._pytree.tree_unflatten(result.outputs, captured.out_spec)
    torch.testing.assert_close(rebuilt["sum"], expected["sum"])
    assert (rebuilt["n"], rebuilt["flag"]) == (5, False)
    assert rebuilt["x"] is x
    assert rebuilt["weight"] is model.linear.weight
    assert largest_error(model, expected["sum"].sum(), rebuilt["sum"].sum()) < 1e-15
    placeholder = captured.placeholders[captured.refs.index(Ref("input", index=0))]
    assert placeholder.meta["requires_grad"]


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast_is_that_of_eager(inside: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).softmax(-1)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return self.inner(x)

    model = Outer() if inside else Inner()
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        captured = capture(model, (x,))
        expected = model(x)
    assert expected.dtype is torch.bfloat16
    (result,) = run(captured, model, x).outputs
    assert torch.equal(result, expected)
    linears = [node for node in captured.module.graph.nodes if is_call(node, aten.linear.default)]
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in linears]
    assert [path[-8:] for path in paths] == ["blocks.0", "blocks.1"]


def test_grad_mode_of_the_caller_does_not_matter() -> None:
    model, kwargs = zoo.build("plain"), zoo.inputs("plain")
    with torch.no_grad():
        captured = capture(model, (), kwargs)
    assert captured.outputs[0].meta["requires_grad"]


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_data_dependent_branch_names_module_and_line() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Branch())
    with pytest.raises(CaptureError, match=r"module: 1 \(Branch\)\n.*return x if x.sum\(\) > 0"):
        capture(model, (torch.randn(2, 2),))


def test_data_dependent_shape_names_the_line() -> None:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0].cumsum(0)

    with pytest.raises(CaptureError, match=r"return x\[x > 0\]"):
        capture(nn.Sequential(nn.Linear(2, 2), Positive()), (torch.randn(2, 2),))


@pytest.mark.parametrize("is_returned", [True, False])
def test_text_of_a_tensor_is_refused_where_it_would_be_seen(is_returned: bool) -> None:
    class Describes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            text = f"x = {x!r}"
            self.seen = None if is_returned else [text, x]
            return {"y": x * 2, "text": text if is_returned else "FakeTensor"}

    with pytest.raises(UnsupportedError, match=r"text of a tensor: 'x = FakeTensor\("):
        capture(Describes(), (torch.ones(2),))


@pytest.mark.parametrize("args", [(), (torch.ones(2, 5),)])
def test_a_call_that_fails_is_one_error(
    args: tuple[Tensor, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CaptureError, match="run it once without compiling"):
        capture(nn.Sequential(nn.Linear(3, 4)), args, {})
    assert not caplog.records  # torch writes a traceback where shapes do not fit


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *args: None),
        lambda module: module.register_forward_pre_hook(lambda *args: None),
        lambda module: module.register_full_backward_hook(lambda *args: None),
    ],
)
def test_hook_inside_the_model_is_refused(register: Callable[[nn.Module], Any]) -> None:
    model = zoo.build("plain")
    register(model.get_submodule("blocks.1.mlp"))
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.mlp"):
        capture(model, (), zoo.inputs("plain"))


@pytest.mark.slow
def test_hooks_of_transformers_are_a_part_of_the_forward() -> None:
    """Mixtral's first call puts hooks on its layers, which collect the routers' logits."""
    size = architectures.AWKWARD
    model = architectures.build("mixtral", size).float()
    kwargs = architectures.inputs("mixtral", size)
    expected = model(**kwargs)
    assert any(module._forward_hooks for module in model.modules())
    for _ in range(2):
        result = run(capture(model, (), kwargs), model, **kwargs)
        assert largest_error(model, expected.loss, result.outputs[0]) < 1e-5
        expected = model(**kwargs)


def test_hook_on_the_model_itself_is_left_to_the_caller() -> None:
    model, kwargs = zoo.build("plain"), zoo.inputs("plain")
    calls: list[str] = []
    model.register_forward_hook(lambda *args: calls.append("hook"))
    capture(model, (), kwargs)
    assert calls == []
    model(**kwargs)
    assert calls == ["hook"]


def test_hook_of_transformers_on_the_model_itself_is_left_to_the_caller_too() -> None:
    def hook(*args: Any) -> None:
        calls.append("hook")

    model, kwargs = zoo.build("plain"), zoo.inputs("plain")
    calls: list[str] = []
    hook.__module__ = "transformers.utils"
    model.register_forward_hook(hook)
    capture(model, (), kwargs)
    assert calls == []


def test_parameter_mutation_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.zeros(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    said = r"(?s)only buffers may be written.*module: \(model\).*self\.count\.add_\(1\)"
    with pytest.raises(UnsupportedError, match=said):
        capture(Counts(), (torch.randn(2),))


def test_a_result_whose_size_depends_on_numbers_is_named() -> None:
    class Solved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.lstsq(x, super().forward(x)).solution

    with pytest.raises(CaptureError, match=r"(?s)aten\.linalg_lstsq.*outside of forward"):
        capture(Solved(4, 4), (torch.randn(6, 4),))


def test_cache_and_checkpointing_warn_once_and_are_put_back() -> None:
    model = zoo.build("llama", use_cache=True)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    with pytest.warns(UserWarning, match="is ignored") as caught:
        capture(model, (), {**zoo.inputs("llama"), "use_cache": True})
    ours = [str(warning.message) for warning in caught if "ignored" in str(warning.message)]
    assert len(ours) == 2
    assert "use_cache" in ours[0]
    assert "checkpointing" in ours[1]
    assert model.config.use_cache is True  # type: ignore[union-attr]
