"""Mistakes of users: the class of the error, and what its text must say."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import sp_compiler
from sp_compiler import (
    ArgumentError,
    CaptureError,
    NotCompiledError,
    SPCompilerError,
    UnsupportedError,
)
from sp_compiler.base.warn import in_library
from tests.helpers.fake_group import fake_group
from tests.helpers.users import Net, batch, compiled, gradients, net, prepared


class Branching(nn.Module):
    """Its result's sign depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


class Looping(Branching):
    """As many layers as the first of them says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.linear(x)[0, 0])):
            x = self.linear(x)
        return x


class Selecting(Branching):
    """Returns as many numbers as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y[y > 0].cumsum(0)


class Reading(Branching):
    """Reads a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * y.max().item()


def _rectified(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


class Helped(Branching):
    """Branches in a function that is no method."""

    def forward(self, x: Tensor) -> Tensor:
        return _rectified(self.linear(x))


class Failing(Branching):
    """Has a mistake of its own."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("my mistake")


class Outer(nn.Module):
    """Holds another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Branching, "if y.sum() > 0:"),
        (Looping, "for _ in range(int(self.linear(x)[0, 0])):"),
        (Helped, "if x.sum() > 0:"),
        (Selecting, "return y[y > 0].cumsum(0)"),
        (Reading, "return y * y.max().item()"),
    ],
)
def test_what_depends_on_data_is_named_with_its_line(kind: type[nn.Module], line: str) -> None:
    module = compiled(lambda: Outer(kind().double()))
    with pytest.raises(CaptureError, match=r"torch\.where") as caught:
        module(batch(3))
    assert line in str(caught.value)
    assert "module: inner" in str(caught.value)


def test_a_failed_capture_leaves_no_hook_behind() -> None:
    """On assignments to buffers of any module, which ``torch.compile`` would break a graph at."""
    with pytest.raises(CaptureError):
        compiled(Branching)(torch.ones(2, 8))
    assert not nn.modules.module._global_buffer_registration_hooks


def test_mistakes_of_the_model_are_shown_with_their_line() -> None:
    module = compiled(lambda: Outer(Failing()))
    with pytest.raises(CaptureError, match="my mistake") as caught:
        module(batch(3))
    assert 'raise KeyError("my mistake")' in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    # The model's own, without the capture around it.
    assert [frame.name for frame in frames if frame.filename == __file__] == ["forward"] * 2
    assert not [frame for frame in frames if in_library(frame.filename)]


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((batch(),), {"nonsense": 3}, "unexpected keyword argument 'nonsense'.*target"),
        ((), {}, "missing a required argument: 'x'"),
        ((batch(), None, 1.0, 2.0), {}, "too many positional arguments"),
    ],
)
def test_arguments_that_the_model_does_not_take(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    module = compiled()
    with pytest.raises(ArgumentError, match=said):
        module(*args, **kwargs)
    with pytest.raises(ArgumentError, match=said):
        module.prepare(*args, **kwargs)


def test_example_inputs_without_a_dict_are_told_the_form() -> None:
    with pytest.raises(ArgumentError, match=r"or \(\(x, y\), \{\}\); got \(Tensor, Tensor\)"):
        sp_compiler.plan(net(), (torch.ones(2, 8), torch.ones(2)), tp=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"example_inputs: missing .*'x'.* takes \(x"):
        sp_compiler.plan(net(), ((), {}), tp=1)


class Classes(Branching):
    """The loss of a classifier."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y.sum() if target is None else nn.functional.cross_entropy(y, target)


_X = torch.ones(2, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        (Net, (_X.float(),), r"layer_norm.*input float32 \(2, 8\)[\s\S]*blocks\.0\.norm"),
        (Classes, (_X.float(),), r"linear.*gets input float32 \(2, 8\), weight float64"),
        (Classes, (_X.long(),), r"linear.*gets input int64"),
        (Classes, (_X, torch.zeros(2, dtype=torch.int32)), r"target is int32[\s\S]*target int32"),
        (
            lambda: nn.Embedding(4, 8),
            (torch.zeros(2, 3),),
            r"Long, Int; but got torch\.float32|embedding.*takes int64 or int32, not float32",
        ),
        (Net, (_X.to("meta"),), r"(same device|different devices)[\s\S]*blocks\.0"),
    ],
)
def test_inputs_that_no_kernel_takes(
    kind: Callable[[], nn.Module], args: tuple[Tensor, ...], said: str
) -> None:
    """Found before a parameter is placed; a right call goes on."""
    module = compiled(lambda: kind().double())
    with pytest.raises(CaptureError, match=said):
        module(*args)
    assert module._sp_state.fixed is None
    right = torch.zeros(2, dtype=torch.int64) if kind not in (Net, Classes) else _X
    module(right)


def test_norms_in_halves_may_have_float32_weights() -> None:
    """As mixed precision does it; kernels take that."""
    module, model = (nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 8)) for _ in range(2))
    x = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(compiled(lambda: module)(x), model(x))


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"recompute": "auto"}, ArgumentError, "needs a memory_budget"),
        ({"memory_budget": "40GiB"}, ArgumentError, "memory_budget"),
        ({"backend": "triton"}, ArgumentError, "'eager', 'inductor'"),
        ({"recompute": "some"}, ArgumentError, "recompute='some': expected one of 'none'"),
        ({"dropout": "off"}, ArgumentError, "'regenerate', 'stored'"),
        ({"outputs": "whole"}, ArgumentError, "'replicate', 'shard', 'auto'"),
        ({"sequence_parallel": 1}, ArgumentError, "True, False"),
        ({"nominal_tokens": 0}, ArgumentError, "positive int"),
        ({"tp": 0}, ArgumentError, "positive int"),
        ({"tp": "8"}, ArgumentError, "positive int"),
        ({"tp": None}, ArgumentError, "tp=<number of ranks>"),
        ({"example_inputs": batch()}, ArgumentError, r"expected \(args, kwargs\)"),
        ({"example_inputs": (batch(),)}, ArgumentError, r"got \(Tensor,\)"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
        ({"ep": 2}, TypeError, "unexpected keyword argument 'ep'"),
        ({"recompue": "full"}, TypeError, r"did you mean 'recompute'\? .*compile\(model\)"),
        ({"exmaple_inputs": ()}, TypeError, "did you mean 'example_inputs'"),
    ],
)
def test_options(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    """The model stays whole and can be compiled with better options."""
    model = net()
    with pytest.raises(kind, match=said):
        sp_compiler.compile(model, **{"tp": 1, **options})
    sp_compiler.compile(model, tp=1)


def test_what_is_no_module() -> None:
    with pytest.raises(ArgumentError, match="function"):
        sp_compiler.compile(lambda x: x, tp=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="ScriptModule"):
        sp_compiler.compile(_scripted(), tp=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def _scripted() -> nn.Module:
    scripted: nn.Module = torch.jit.script(nn.Linear(2, 2))
    return scripted


def test_a_model_without_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    said = r"^model\.0 \(LazyLinear\) has no shape for its weight yet: call the model once"
    with pytest.raises(ArgumentError, match=said):
        sp_compiler.compile(model, tp=1)
    model(batch().float())
    sp_compiler.compile(model, tp=1)


def test_no_process_group() -> None:
    model = net()
    with pytest.raises(ArgumentError) as caught:
        sp_compiler.compile(model, tp=2)
    for advice in (
        "torchrun --nproc-per-node=2",
        "init_process_group",
        "sp_compiler.plan",
        "verify",
    ):
        assert advice in str(caught.value)
    sp_compiler.compile(model, tp=1)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with fake_group(4):
        yield


@pytest.mark.usefixtures("four_ranks")
def test_a_process_group_of_another_size() -> None:
    for tp in (2, 8):
        with pytest.raises(ArgumentError, match=rf"tp={tp}.* has 4 ranks") as caught:
            sp_compiler.compile(net(), tp=tp)
        assert "sp_compiler.plan" in str(caught.value)
    mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(ArgumentError, match="must be named"):
        sp_compiler.compile(net(), mesh=mesh)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ArgumentError, match="the mesh has 2 ranks"):
        sp_compiler.compile(net(), tp=4, mesh=mesh)


def test_optimizers_that_come_too_early() -> None:
    model = net()
    early = torch.optim.AdamW(model.parameters())
    with pytest.raises(ArgumentError, match=r"AdamW.*create it after sp_compiler\.compile"):
        sp_compiler.compile(model, tp=1)
    del early


def test_nothing_compiled_yet() -> None:
    module = compiled()
    for name in ("plan", "code", "stages"):
        with pytest.raises(NotCompiledError, match="call the module once"):
            getattr(module, name)
    with pytest.raises(NotCompiledError, match="call the module once"):
        module.diff("capture", "final")


def test_parts_of_the_model_cannot_be_called_alone() -> None:
    module = compiled()
    with pytest.raises(UnsupportedError, match=r"blocks\.0.*call the compiled model"):
        module.blocks[0](batch())


def test_a_failed_call_leaves_the_module_usable() -> None:
    module = compiled()
    with pytest.raises(CaptureError):
        module(torch.zeros(4, 5, dtype=torch.float64))
    module(batch())["loss"].backward()
    assert set(gradients(module)) == {name for name, _ in Net().named_parameters()}


def test_a_model_that_cannot_be_compiled_is_given_back() -> None:
    model = Outer(Branching().double())
    weight, before = model.inner.linear.weight, model(batch(3))
    with pytest.raises(CaptureError):
        sp_compiler.compile(model, tp=1, example_inputs=((batch(3),), {}))
    assert torch.equal(model(batch(3)), before)
    assert model.inner.linear.weight is weight
    with pytest.raises(CaptureError):
        sp_compiler.compile(model, tp=1, example_inputs=((batch(3),), {}))
    module = prepared()
    with pytest.raises(UnsupportedError, match=r"state_dict\(\)"):
        module.give_back()


def test_every_error_is_one_of_ours() -> None:
    kinds = [kind for kind in vars(sp_compiler).values() if isinstance(kind, type)]
    errors = [kind for kind in kinds if re.search("Error$", kind.__name__)]
    assert len(errors) >= 8
    assert all(issubclass(kind, SPCompilerError) for kind in errors)


def test_parts_of_a_compiled_model() -> None:
    """They cannot be in two compiled modules: tied weights would come apart without a word."""
    first, module, tied = net(), net(), net()
    module.head, tied.head.weight = first.head, first.head.weight
    whole = compiled(lambda: first)
    for other in (module, tied):
        with pytest.raises(ArgumentError, match=r"'head\.weight' belongs to another model"):
            sp_compiler.compile(other, tp=1)
    with pytest.raises(ArgumentError, match="module '1' of the model is a compiled module"):
        compiled(lambda: nn.Sequential(net(), whole))


def test_a_model_that_was_given_back_is_free() -> None:
    """Its parameters can be compiled again, in this model or another."""
    model = net()
    with pytest.raises(CaptureError):
        compiled(lambda: model, example_inputs=((batch(3)[..., :5],), {}))
    compiled(lambda: model)(batch())["loss"].backward()


@torch.library.custom_op("errors_test::log", mutates_args=())
def log(x: Tensor) -> Tensor:
    return x.clone()


log.register_fake(torch.empty_like)
log.register_autograd(lambda ctx, grad: grad)


class Logging(Branching):
    """Calls an operator for what it does besides its result."""

    def forward(self, x: Tensor) -> Tensor:
        return log(self.linear(x))


def test_operators_with_effects() -> None:
    handle = _register_effectful_op(log._opoverload, _EffectType.ORDERED)
    try:
        with pytest.raises(UnsupportedError, match=r"errors_test\.log.*effects") as error:
            compiled(Logging)(torch.ones(2, 8))
    finally:
        handle.destroy()
    assert "return log(self.linear(x))" in str(error.value)


def test_arguments_that_are_missing_or_too_many() -> None:
    with pytest.raises(
        TypeError, match=r"required argument: 'memory'; expected suggest\(model, ex"
    ):
        sp_compiler.suggest(net(), ((batch(),), {}), gpus=8, microbatches=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"too many positional.*expected compile\(model\)"):
        sp_compiler.compile(net(), 2)  # type: ignore[call-arg, misc]
