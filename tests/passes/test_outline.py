"""Outlining: the program computes the same as the flat graph, with one region per kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import calls
from sp_compiler.ir.program import Program, Ref
from sp_compiler.ir.text import render
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.reference import run_captured, run_program
from tests.helpers.slow import slow
from tests.models import zoo
from tests.trace.test_export import gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
sp = torch.ops.sp_compiler


def outlined(
    model: nn.Module, *args: Any, dropout: Any = "regenerate", **kwargs: Any
) -> tuple[Captured, Program]:
    captured = capture(model, args, kwargs)
    normalize(captured, dropout=dropout)
    return captured, outline(captured)


def check_program(program: Program) -> None:
    """Invariants of every program."""
    names = [region.name for region in program.regions]
    assert len(set(names)) == len(names)
    for region in program.regions:
        region.module.graph.lint()
        assert len(region.placeholders) == len(region.input_kinds) == len(region.input_names)
        assert region.input_kinds.count("seed") <= 1
        for node, kind in zip(region.placeholders, region.input_kinds, strict=True):
            assert node.users
            assert node.meta["val"] is not None
            assert isinstance(node.meta["requires_grad"], bool)
            assert kind == "param" or not node.name.startswith("p_")
        assert all(node.op == "call_function" for node in region.outputs)
        assert len(set(region.outputs)) == len(region.outputs)
    for index, call in enumerate(program.calls):
        assert len(set(call.args)) == len(call.args)
        assert tuple(ref.kind for ref in call.args) == call.region.input_kinds
        for ref in call.args:
            if ref.kind == "call":
                assert ref.index < index
                assert ref.output < len(program.calls[ref.index].region.outputs)
    used = {ref for call in program.calls for ref in call.args}
    used |= {leaf for leaf in program.outputs if isinstance(leaf, Ref)}
    used |= set(program.mutated_buffers.values())
    for index, call in enumerate(program.calls):
        for position in range(len(call.region.outputs)):
            assert Ref("call", index=index, output=position) in used


@pytest.mark.parametrize(
    "name", zoo.cases("gpt2", "llama", "bert", "vit", "plain", "encoder", "lora")
)
def test_program_equals_flat_graph_bitwise(name: str) -> None:
    model, kwargs = zoo.build(name), zoo.inputs(name)
    captured, program = outlined(model, **kwargs)
    check_program(program)
    leaves, _ = flatten_inputs((), kwargs)
    named = dict(model.named_parameters()), dict(model.named_buffers())
    flat = run_captured(captured, *named, leaves)
    outlined_result = run_program(program, *named, leaves)
    for expected, actual in zip(flat.outputs, outlined_result.outputs, strict=True):
        assert torch.equal(expected, actual)
    wanted = gradients(model, zoo.loss_of(flat.outputs))
    got = gradients(model, zoo.loss_of(outlined_result.outputs))
    for parameter, gradient in wanted.items():
        if gradient is None:
            assert got[parameter] is None
        else:
            assert torch.equal(gradient, got[parameter])  # type: ignore[arg-type]


REGIONS = {
    "gpt2": ["Prologue", "GPT2Block", "Epilogue"],
    "llama": ["Prologue", "LlamaDecoderLayer", "Epilogue"],
    "bert": ["Prologue", "BertLayer", "Epilogue"],
    "plain": ["Prologue", "Block", "Epilogue"],
    "encoder": ["Prologue", "TransformerEncoderLayer", "Epilogue"],
    # The first input of the layers requires no gradient, that of the others does.
    "lora": ["Prologue", "LoraBlock", "LoraBlock2", "Epilogue"],
    # The first layer of each stack makes the position bias.
    "t5": ["Prologue", "T5Block", "T5Block2", "Glue", "T5Block3", "T5Block4", "Epilogue"],
}


# The other tests have the depth that more layers are added to.
@pytest.mark.parametrize(
    ("name", "more"),
    [("plain", 0), *((name, 2) for name in REGIONS if name != "t5"), slow("t5", 2)],
)
def test_regions_do_not_grow_with_depth(name: str, more: int) -> None:
    layers = (3 if name == "t5" else 2) + more
    model = zoo.build(name, layers=layers, dropout=0.1)
    _, program = outlined(model, **zoo.inputs(name))
    check_program(program)
    assert [region.name for region in program.regions] == REGIONS[name]
    assert sum(bool(call.path) for call in program.calls) == layers * (2 if name == "t5" else 1)


def test_paths_and_names_are_those_of_the_model() -> None:
    _, program = outlined(zoo.build("gpt2"), **zoo.inputs("gpt2"))
    assert [call.path for call in program.calls] == ["", "transformer.h.0", "transformer.h.1", ""]
    block = program.calls[1]
    assert block.region is program.calls[2].region
    assert block.region.input_names[:3] == ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight")
    assert program.calls[2].args[2] == Ref("param", "transformer.h.1.attn.c_attn.weight")
    assert program.aliases == {"lm_head.weight": "transformer.wte.weight"}


class Layer(nn.Module):
    """A layer with a branch that is only there for some of its calls."""

    def __init__(self, bias: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=bias)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x) * self.scale, 0.5)


class Stack(nn.Module):
    """Layers with glue between them: a residual added by the parent."""

    def __init__(self, *layers: nn.Module, order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x.sum()


def test_shared_layer_is_called_several_times() -> None:
    _, program = outlined(Stack(Layer(), order=(0, 0, 0)), torch.randn(2, 4))
    assert [call.path for call in program.calls[:3]] == ["layers.0"] * 3
    # The first call differs: its input is the user's and requires no gradient.
    assert program.calls[1].region is program.calls[2].region
    assert program.calls[1].args != program.calls[2].args


class Modulated(nn.Module):
    """Layers between uses of the parts of one split."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(4, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, last_only: bool) -> Tensor:
        scale, shift, gate = self.modulation(x).chunk(3, -1)
        if not last_only:
            for layer in self.layers:
                x = layer(x) * scale + shift
        else:
            x = self.layers[0](x) * (scale + shift)
        return x + gate


@pytest.mark.parametrize(("last_only", "call"), [(False, 0), (True, 1)])
def test_a_split_and_its_parts_are_one_unit(last_only: bool, call: int) -> None:
    """It moves to the one later piece that uses all of them; no list leaves a region."""
    _, program = outlined(Modulated(), torch.randn(2, 4), last_only)
    check_program(program)
    splits = [
        index
        for index, item in enumerate(program.calls)
        if any(calls(item.region.module.graph, torch.ops.aten.split_with_sizes.default))
    ]
    assert splits == [call]
    for found in program.regions:
        assert all(isinstance(node.meta["val"], Tensor) for node in found.outputs)


def test_dropout_sites_count_inside_the_region() -> None:
    _, program = outlined(Stack(Layer(), Layer()), torch.randn(2, 4))
    (layer, *_) = program.regions
    assert [node.args[3] for node in calls(layer.module.graph, sp.dropout.default)] == [0]
    seeds = [ref for call in program.calls for ref in call.args if ref.kind == "seed"]
    assert len(seeds) == 2


@pytest.mark.parametrize("other", [Layer(bias=False), Layer(scale=2.0), Layer().half()])
def test_layers_that_differ_are_not_shared(other: Layer) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first = stack.layers[0](x)
            return stack.layers[1](first.to(other.linear.weight.dtype)).sum()

        def __init__(self) -> None:
            super().__init__()
            self.stack = stack

    stack = Stack(Layer(), other)
    _, program = outlined(Cast(), torch.randn(2, 4))
    layers = [call.region for call in program.calls if call.path]
    assert layers[0] is not layers[1]
    assert [region.name for region in layers] == ["Layer", "Layer2"]


def test_frozen_layer_is_not_shared_with_a_trained_one() -> None:
    stack = Stack(Layer(), Layer())
    stack.layers[1].requires_grad_(False)
    _, program = outlined(stack, torch.randn(2, 4, requires_grad=True))
    layers = [call.region for call in program.calls if call.path]
    assert layers[0] is not layers[1]


@pytest.mark.parametrize("also_learns", [False, True])
def test_layers_of_which_all_results_are_detached_train_nothing(also_learns: bool) -> None:
    """Also the first of them, whose result is detached only behind the second; not those of which
    one result is."""

    class Taught(Stack):
        def forward(self, x: Tensor) -> Tensor:
            taught = self.layers[1](self.layers[0](x))
            learned = self.layers[1](self.layers[0](x + 1))
            return (learned - (taught if also_learns else taught.detach())).square().sum()

    _, program = outlined(Taught(Layer(), Layer()), torch.randn(2, 4))
    first, second, *others = [call.region for call in program.calls if call.path]
    for region in (first, second):
        assert region.outputs[0].meta["requires_grad"] is also_learns
        flags = {node.meta["requires_grad"] for node in region.placeholders}
        assert (True in flags) is also_learns
    assert all(region.outputs[0].meta["requires_grad"] for region in others)


def test_model_without_layers_is_one_region() -> None:
    _, program = outlined(nn.Bilinear(3, 4, 5), torch.randn(2, 3), torch.randn(2, 4))
    assert [region.name for region in program.regions] == ["Model"]


def test_what_computes_a_weight_is_no_layer() -> None:
    """Though it is in an indexed container."""
    model = parametrizations.weight_norm(nn.Linear(3, 4))
    _, program = outlined(model, torch.randn(2, 3))
    assert [region.name for region in program.regions] == ["Model"]


def test_inputs_and_constants_returned_as_they_are() -> None:
    class Echo(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
            return x, 3, x + y, None

    _, program = outlined(Echo(), torch.randn(2), torch.randn(2))
    assert program.outputs == [Ref("input", index=0), 3, Ref("call", index=0), None]


def test_stored_and_regenerated_dropout_give_the_same_program_result() -> None:
    model, kwargs = zoo.build("gpt2", dropout=0.2), zoo.inputs("gpt2")
    leaves, _ = flatten_inputs((), kwargs)
    losses, grads = [], []
    for kind in ("regenerate", "stored"):
        _, program = outlined(model, dropout=kind, **kwargs)
        named = dict(model.named_parameters()), dict(model.named_buffers())
        result = run_program(program, *named, leaves, seed=torch.tensor(3))
        losses.append(zoo.loss_of(result.outputs))
        grads.append(gradients(model, losses[-1]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)
    other = run_program(program, *named, leaves, seed=torch.tensor(4))
    assert abs(float(zoo.loss_of(other.outputs) - losses[0])) > 1e-3


def test_outline_leaves_the_capture_alone() -> None:
    captured = capture(zoo.build("plain"), (), zoo.inputs("plain"))
    normalize(captured)
    before = render(captured.module.graph)
    first, second = outline(captured), outline(captured)
    assert render(captured.module.graph) == before
    assert [render(r.module) for r in first.regions] == [render(r.module) for r in second.regions]
