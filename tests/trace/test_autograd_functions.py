"""A ``torch.autograd.Function`` keeps its own backward, and is sharded if it is pointwise."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import sp_compiler
from benchmarks.shares import flops_share, parameter_share
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.planning.fallbacks import fallbacks
from sp_compiler.trace import autograd_functions
from sp_compiler.verification.simulate import simulate_step
from tests.helpers.parity import SEED, gradient_error
from tests.helpers.slow import slow

_WIDTH = 32
Call = Callable[[Tensor, Tensor], Tensor]


class ClippedGate(Function):
    """Pointwise; the backward is not the derivative of the forward. Numbers stay numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (ctx.slope * x).clamp(-0.1, 0.5), None


class DividedByWidth(Function):
    """Pointwise operators, but a number is a size: one rank's is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.width = x.shape[-1]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.width


class SumOfRow(Function):
    """Mixes features in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sum(-1, keepdim=True).expand_as(grad)


class ScaledNorm(Function):
    """Two results, one of them a statistic; operands of several shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        inverse = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale, inverse)
        return x * inverse * scale, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inverse: Tensor) -> Any:
        x, scale, inverse = ctx.saved_tensors
        return 2 * grad * scale * inverse, (grad * x * inverse).flatten(0, -2).sum(0)


class Between(nn.Module):
    """A function between two linears."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.ones(2 * _WIDTH))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.call(self.up(x), self.scale)).square().sum()


# As many models have it: stored before the capture, which patches the class.
_clipped_gate: Call = ClippedGate.apply

_CALLS: dict[str, Call] = {
    "pointwise": lambda x, scale: ClippedGate.apply(x * scale, 1.7),
    "stored": lambda x, scale: _clipped_gate(x * scale, 1.7),  # type: ignore[arg-type]
    "size": lambda x, scale: DividedByWidth.apply(x * scale),
    "row": lambda x, scale: SumOfRow.apply(x * scale),
    "norm": lambda x, scale: ScaledNorm.apply(x, scale)[0],
}


def _model(call: Call) -> nn.Module:
    torch.manual_seed(0)
    return Between(call).double()


def _x(batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 6, _WIDTH, generator=generator, dtype=torch.float64)


def _eager_grads(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    eager = copy.deepcopy(model)
    eager(x).backward()
    return {name: value.grad for name, value in eager.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tp", [slow(1), 2, slow(4)])
@pytest.mark.parametrize("name", _CALLS)
def test_its_backward_is_kept(name: str, tp: int, recompute: Any) -> None:
    model = _model(_CALLS[name])
    compiled = build(model, (_x(),), {}, CompileOptions(tp=tp, recompute=recompute))
    step = simulate_step(compiled, dict(model.named_parameters()), {}, [_x()], SEED)
    assert gradient_error(step.grads, _eager_grads(model, _x())) < 1e-12


@pytest.mark.parametrize(
    ("name", "gathers"), [("pointwise", 0), ("stored", 0), ("size", 1), ("row", 1)]
)
def test_only_a_pointwise_one_is_sharded(name: str, gathers: int) -> None:
    model = _model(_CALLS[name])
    compiled = build(model, (_x(),), {}, CompileOptions(tp=2))
    assert parameter_share(compiled) == 1.0
    assert flops_share(build(model, (_x(),), {}, CompileOptions(tp=1)).program, compiled) == 1.0
    nodes = [node for region in compiled.program.regions for node in region.module.graph.nodes]
    functions = [
        node for node in nodes if node.target is torch.ops.sp_compiler_function.apply.default
    ]
    width = functions[0].args[0][0].meta["val"].shape[-1]
    assert width == (2 * _WIDTH if gathers else _WIDTH)
    said = [line for line in fallbacks(compiled) if "is not pointwise" in line]
    assert len(said) == gathers


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_through_torch_compile() -> None:
    model = _model(_CALLS["pointwise"])
    expected = _eager_grads(model, _x())
    compiled = torch.compile(model, backend="sp_compiler", options={"tp": 1})
    compiled(_x()).backward()
    found = {name: value.grad for name, value in model.named_parameters()}
    assert gradient_error(found, expected) < 1e-12


def test_other_sizes() -> None:
    model = _model(_CALLS["pointwise"])
    compiled = sp_compiler.compile(copy.deepcopy(model), tp=1)
    for batch in (2, 5, 4):
        compiled.zero_grad()
        compiled(_x(batch)).backward()
        found = {name: value.grad for name, value in compiled.named_parameters()}
        assert gradient_error(found, _eager_grads(model, _x(batch))) < 1e-12


class Writes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Draws(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Closure(Function):
    """Uses a parameter that it is not given."""

    weight = nn.Parameter(torch.ones(()))

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Closure.weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _hooked(x: Tensor, scale: Tensor) -> Tensor:
    y = x * scale
    y.register_hook(lambda grad: 3 * grad)
    return y


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, scale: Writes.apply(x * scale), "Writes, .* writes into its inputs"),
        (lambda x, scale: Draws.apply(x * scale), "Draws, .* draws random numbers"),
        (
            lambda x, scale: Closure.apply(x * scale),
            "Closure, .* uses a tensor that it is not",
        ),
        (_hooked, "forward calls Tensor.register_hook"),
    ],
)
def test_what_would_be_lost_is_refused(call: Call, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        sp_compiler.compile(_model(call), tp=1)(_x())
    assert "test_autograd_functions.py" in str(caught.value)


def test_calls_go_with_the_program_that_names_them() -> None:
    """They hold the user's arguments of the function, and a process may compile many models."""
    gc.collect()
    before = len(autograd_functions._CALLS)
    compiled = build(_model(_CALLS["pointwise"]), (_x(),), {}, CompileOptions(tp=2))
    (call,) = map(weakref.ref, compiled.program.functions)
    assert call() is not None
    assert len(autograd_functions._CALLS) == before + 1
    del compiled
    gc.collect()
    assert call() is None
    assert len(autograd_functions._CALLS) == before


class Floored(Function):
    """Numbers that are made inside, as the masked softmax of DeBERTa makes its lowest one."""

    numbers: Any = 0.5

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.masked_fill(x < 0.5, torch.tensor(0.5, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x >= 0.5) * torch.tensor(Floored.numbers, dtype=x.dtype)


def test_it_may_make_a_tensor_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(lambda x, scale: Floored.apply(x * scale))
    compiled = build(model, (_x(),), {}, CompileOptions(tp=2))
    step = simulate_step(compiled, dict(model.named_parameters()), {}, [_x()], SEED)
    assert gradient_error(step.grads, _eager_grads(model, _x())) < 1e-12
    monkeypatch.setattr(Floored, "numbers", [1.0, *[2.0] * (2 * _WIDTH - 1)])
    with pytest.raises(UnsupportedError, match="several numbers"):
        build(model, (_x(),), {}, CompileOptions(tp=2))


class Checkpointed(nn.Module):
    """A block behind an embedding, in the reentrant form of ``torch.utils.checkpoint``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(7, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y: Tensor = checkpoint(self.block, x, use_reentrant=True)
        return (x * y.tanh()).square().sum()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_reentrant_checkpoint_hides_no_gradient(frozen: bool) -> None:
    """As in eager, parameters inside get none where nothing before it is trained."""
    torch.manual_seed(0)
    model = Checkpointed().double()
    model.embed.requires_grad_(not frozen)
    ids = torch.arange(6).view(2, 3)
    if frozen:
        module = sp_compiler.compile(model, tp=1)
        assert not module(ids).requires_grad
        return
    expected = _eager_grads(model, ids)
    module = sp_compiler.compile(model, tp=1)
    module(ids).backward()
    found = {name: value.grad for name, value in module.named_parameters()}
    assert gradient_error(found, expected) < 1e-12
