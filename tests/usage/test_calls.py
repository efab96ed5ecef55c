"""Calls that a module accepts, and when it compiles again."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler import ArgumentError, CaptureError, UnsupportedError
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from tests.helpers.users import (
    Net,
    assert_same_gradients,
    batch,
    compiled,
    gradients,
    net,
    num_compiled,
    prepared,
)
from tests.models import zoo


class Flexible(nn.Module):
    """Takes nested inputs and Python values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, pair: dict[str, Tensor], *more: Tensor, kind: str = "gelu", scale: float = 1.0
    ) -> dict[str, Any]:
        x = self.linear(pair["first"]) + pair["second"]
        for extra in more:
            x = x + extra
        x = (F.gelu(x) if kind == "gelu" else F.relu(x)) * scale
        return {"x": x, "kind": kind, "none": None, "again": (x, [x.sum()])}


def _flexible() -> nn.Module:
    torch.manual_seed(4)
    return Flexible().double()


def test_a_new_shape_compiles_once_more() -> None:
    module, model = prepared(), net()
    for shape in ((4, 6), (2, 3), (4, 6), (5, 1)):
        torch.testing.assert_close(module(batch(*shape)), model(batch(*shape)), rtol=1e-11, atol=0)
    assert num_compiled(module) == 3


def test_the_number_of_dims_may_change() -> None:
    module, model = compiled(), net()
    for shape in ((4,), (2, 3, 2)):
        torch.testing.assert_close(module(batch(*shape)), model(batch(*shape)), rtol=1e-11, atol=0)


class Attention(nn.Module):
    """Heads by their number, so that no size is left to be inferred."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], x.shape[1], 3, 4, 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind())
        loss: Tensor = self.out(y.transpose(1, 2).reshape(x.shape)).square().sum()
        return loss


def test_an_empty_batch() -> None:
    """No tokens, no gradient; the same in parts as whole, also where parameters are placed."""
    torch.manual_seed(0)
    model = Attention().double()
    module = compiled(lambda: copy.deepcopy(model))
    for size in (0, 2, 0):
        for one in (module, model):
            one.zero_grad()
            one(batch(size, 6)).backward()
        assert_same_gradients(module, model)
    options = CompileOptions(tp=2)
    placed = build(model, (batch(2, 6),), {}, options).param_placements
    assert placed["qkv.weight"].is_sharded
    again = build(model, (batch(0, 6),), {}, options, fixed=placed)
    assert again.param_placements == placed
    assert sp_compiler.verify(model, ((batch(0, 6),), {}), tp=2).ok


def test_keyword_arguments_have_no_order() -> None:
    module = compiled()
    target = torch.ones(4, 6, 3, dtype=torch.float64)
    expected = net()(batch(), target, 2.0)["loss"]
    for kwargs in (
        {"x": batch(), "target": target, "scale": 2.0},
        {"scale": 2.0, "target": target, "x": batch()},
    ):
        torch.testing.assert_close(module(**kwargs)["loss"], expected, rtol=1e-12, atol=0)
    assert num_compiled(module) == 1
    torch.testing.assert_close(module(batch(), target, 2.0)["loss"], expected, rtol=1e-12, atol=0)


def test_a_forward_sees_the_order_of_what_it_takes_under_any_name() -> None:
    """As on one device: the tokens of two modalities follow each other as they were given."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3, dtype=torch.float64)

        def forward(self, scale: float = 1.0, **modalities: Tensor) -> Tensor:
            result: Tensor = self.linear(torch.cat([*modalities.values()], 1).cumsum(1)) * scale
            return result

    torch.manual_seed(0)
    model = Joined()
    module = sp_compiler.compile(copy.deepcopy(model), tp=1)
    text, image = batch(), batch(seed=2) * 3
    # ``modalities`` may be such a name itself.
    for first, second in (("text", "image"), ("image", "text"), ("text", "modalities")):
        kwargs = {first: text, second: image}
        expected = model(**kwargs, scale=2.0)
        torch.testing.assert_close(module(scale=2.0, **kwargs), expected, rtol=1e-12, atol=0)
        module(**kwargs, scale=2.0)
    assert num_compiled(module) == 3


def test_structures_and_python_values_are_part_of_the_key() -> None:
    module, model = compiled(_flexible), _flexible()
    inputs = {"first": batch(), "second": batch(seed=2)}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((inputs,), {}),
        (({"second": inputs["second"], "first": inputs["first"]},), {}),
        ((inputs,), {"scale": 2}),
        ((inputs,), {"scale": 2.0}),
        ((inputs,), {"kind": "relu"}),
        ((inputs, batch(seed=3), batch(seed=4)), {}),
    ]
    for args, kwargs in calls:
        actual, true = module(*args, **kwargs), model(*args, **kwargs)
        assert (actual["kind"], actual["none"]) == (true["kind"], None)
        torch.testing.assert_close(actual["x"], true["x"], rtol=1e-12, atol=0)
        torch.testing.assert_close(actual["again"], true["again"], rtol=1e-12, atol=0)
    assert num_compiled(module) in (5, 6)  # whether dicts are ordered is up to pytree


def test_whether_an_input_requires_a_gradient_is_part_of_the_key() -> None:
    module = prepared()
    module(batch())["loss"].backward()
    x = batch().requires_grad_()
    module(x)["loss"].backward()
    assert x.grad is not None
    assert num_compiled(module) == 2


def test_churn_warns_once_and_stays_bounded() -> None:
    module, model = compiled(lambda: nn.Linear(8, 2).double()), nn.Linear(8, 2).double()
    model.load_state_dict(module.state_dict())
    module._sp_state.programs.size = 2
    for shape in ((1,), (1, 2)):
        module(batch(*shape))
    with pytest.warns(UserWarning, match="more than 2 different kinds of inputs"):
        module(batch(1, 2, 3))
    torch.testing.assert_close(module(batch(1)), model(batch(1)), rtol=1e-11, atol=0)
    assert num_compiled(module) == 2


def test_strided_inputs() -> None:
    module, model = prepared(), net()
    x = batch(6, 4).transpose(0, 1)
    torch.testing.assert_close(module(x), model(x), rtol=1e-11, atol=0)
    assert num_compiled(module) == 1


def test_a_tensor_may_be_passed_twice() -> None:
    model = zoo.build("gpt2", layers=1)
    module = sp_compiler.compile(zoo.build("gpt2", layers=1), tp=1)
    ids = zoo.inputs("gpt2")["input_ids"]
    for one in (module, model):
        one(ids, labels=ids).loss.backward()
    other = ids.roll(1)
    actual, true = (one(ids, labels=other) for one in (module, model))
    torch.testing.assert_close(actual.loss, true.loss, rtol=1e-6, atol=0)
    assert type(actual) is type(true)
    assert num_compiled(module) == 1
    for name, grad in gradients(model).items():
        torch.testing.assert_close(gradients(module)[name], grad, rtol=1e-5, atol=1e-7)


def test_the_cache_is_refused_once() -> None:
    module = sp_compiler.compile(zoo.build("gpt2", layers=1, use_cache=True), tp=1)
    ids = zoo.inputs("gpt2")["input_ids"]
    with pytest.warns(UserWarning, match="keeps no cache"):
        assert module(ids).past_key_values is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(ids)
    module(ids[:1])
    assert module.config.use_cache is True


@pytest.mark.parametrize(
    ("x", "said", "got"),
    [
        (torch.zeros(4, 5, dtype=torch.float64), r"blocks\.0", r"float64 \(4, 5\)"),
        (batch().float(), "takes one dtype", r"float32 \(4, 6, 8\)"),
        ([0.5] * 99, "must be Tensor, not list", r"list \[0\.5, 0\.5,.* \.\.\."),
    ],
)
def test_inputs_of_another_kind(x: Any, said: str, got: str) -> None:
    """A call after the first is told which argument is not as before."""
    module = compiled()
    with pytest.raises(CaptureError, match=said) as first:
        module(x=x)
    assert "other arguments" not in str(first.value)
    module(batch())
    was = r"x is " + got + r", and was float64 \(4, 6, 8\)\n  what to do: pass arguments as in"
    with pytest.raises(CaptureError, match=said) as later:
        module(x=x)
    assert re.search(f"compiled for other arguments: {was}", str(later.value))
    module(batch())


def test_a_wrong_name_that_forward_takes_is_named() -> None:
    class Net(nn.Module):
        def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
            if input_ids is None:
                raise ValueError("specify input_ids")
            return input_ids * 2

    module = sp_compiler.compile(Net(), tp=1)
    said = r"specify input_ids[\s\S]*arguments that forward takes under any name: ids\n  what to"
    with pytest.raises(CaptureError, match=said):
        module(ids=torch.ones(2))


def test_an_array_is_named() -> None:
    module, said = compiled(), r"^x is a NumPy array of int64 \(4, 8\): pass torch"
    for _ in range(2):  # the first call, and a later one
        with pytest.raises(ArgumentError, match=said):
            module(x=np.zeros((4, 8), dtype=np.int64))
        module(batch())


@pytest.mark.parametrize(
    ("scale", "kind", "said"),
    [
        (torch.float32, CaptureError, r"^scale is of <class 'torch.dtype'>: inputs are tensors"),
        (nn.Linear(1, 1), ArgumentError, r"^scale is a module \(Linear\): .* make it an attribute"),
    ],
)
def test_what_is_no_input_is_named(scale: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        compiled()(batch(), scale=scale)


def test_save_pretrained_on_one_rank(tmp_path: Path) -> None:
    model = zoo.build("gpt2", layers=1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sp_compiler.compile(model, tp=1).save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_attributes_pass_through() -> None:
    module = sp_compiler.compile(zoo.build("gpt2", layers=1), tp=1)
    assert module.config.n_embd == 32
    assert module.device == torch.device("cpu")
    assert module.dtype is torch.float64
    assert module.num_parameters() == zoo.build("gpt2", layers=1).num_parameters()
    assert module.get_input_embeddings().weight is module.transformer.wte.weight
    assert len(module.transformer.h) == 1
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = module.no_such_thing
    assert "GPT2LMHeadModel" in repr(module)
    assert "labels" in inspect.signature(module.forward).parameters


def test_a_huggingface_model_saves_itself(tmp_path: Path) -> None:
    module: Any = sp_compiler.compile(zoo.build("gpt2", layers=1, dtype=torch.float32), tp=1)
    inputs = zoo.inputs("gpt2")
    loss = module(**inputs).loss
    module.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**inputs).loss, loss)


def test_example_inputs_compile_at_once() -> None:
    module = compiled(example_inputs=((batch(),), {}))
    assert num_compiled(module) == 1
    assert "def forward" in module.code
    torch.testing.assert_close(module(batch()), net()(batch()), rtol=1e-12, atol=0)
    assert num_compiled(module) == 1


def test_the_original_belongs_to_the_compiled_module() -> None:
    model = net()
    module: Any = sp_compiler.compile(model, tp=1)
    with pytest.raises(UnsupportedError, match=r"that sp_compiler\.compile returned.*: call it"):
        model(batch())
    with pytest.raises(ArgumentError, match="compiled before"):
        sp_compiler.compile(model, tp=1)
    with pytest.raises(ArgumentError, match="compiled module already"):
        sp_compiler.compile(module, tp=1)
    other: Any = sp_compiler.compile(nn.Linear(8, 2), tp=1)
    other(batch(dtype=torch.float32))
    module(batch())


def test_copies_are_independent() -> None:
    module = prepared()
    loss = module(batch())["loss"].item()
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(batch())["loss"].backward()
    optimizer.step()
    assert module(batch())["loss"].item() == loss
    assert twin(batch())["loss"].item() < loss
    assert not gradients(module)
    fresh = copy.deepcopy(compiled(lambda: nn.Linear(8, 2)))
    assert fresh(batch(dtype=torch.float32)).shape == (4, 6, 2)


def test_pickling_points_to_the_state_dict() -> None:
    with pytest.raises(UnsupportedError, match=r"module\.state_dict\(\)"):
        pickle.dumps(compiled())


def test_attributes_that_are_set_count_from_the_next_call_on() -> None:
    module = prepared(0.5)
    twin = copy.deepcopy(module)
    for layer in module.blocks:
        layer.dropout.p = 0.0
    torch.testing.assert_close(module(batch())["loss"], net()(batch())["loss"], rtol=1e-12, atol=0)
    assert num_compiled(module) == 2
    assert twin.blocks[0].dropout.p == 0.5
    assert twin(batch())["loss"] != twin(batch())["loss"]


def test_methods_of_the_model_see_its_parameters() -> None:
    class WithMethods(Net):
        factor = 2

        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

        @property
        def num_weights(self) -> int:
            return sum(parameter.numel() for parameter in self.parameters())

        @property
        def half_bias(self) -> Tensor:
            return self.head.bias / 2

    module = compiled(lambda: WithMethods().double())
    optimizer = module.make_optimizer()
    before = module(batch())["loss"]
    before.backward()
    optimizer.step()
    assert module(batch())["loss"] < before
    assert module.num_weights == sum(p.numel() for p in Net().parameters())
    assert torch.equal(2 * module.half_bias, module.head.bias)
    assert module.factor == 2


def test_modules_and_parameters_cannot_be_exchanged() -> None:
    module = compiled()
    with pytest.raises(UnsupportedError, match=r"before sp_compiler\.compile"):
        module.head = nn.Linear(8, 5)
    with pytest.raises(UnsupportedError, match="keep their shapes"):
        module.head.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match="keep their shapes"):
        module.head.extra = nn.Parameter(torch.zeros(3))
    module.head.weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
    module.head.bias.data.zero_()
    assert module(batch())["loss"].item() == 0
    module.note = "mine"
    assert module.note == "mine"
