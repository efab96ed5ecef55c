"""Backwards that are not linear in their tangents: auxiliary losses, and results without gradient.

As in eager code, each runs if a gradient reaches any of its results, and only then.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.users import assert_same_gradients

_WIDTH = 8


class WithAuxiliary(Function):
    """Returns ``x``, and adds a loss to whatever is computed from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_ones(())


class Scaled(WithAuxiliary):
    """Megatron's form, whose class has the scale of the losses, made in the first backward."""

    scale: Tensor | None = None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if Scaled.scale is None:
            Scaled.scale = torch.tensor(1.0, device=grad.device)
        return grad, grad.new_ones(()) * Scaled.scale


class Regularized(Function):
    """Adds to the gradient of an activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + 0.1 * x


class Pair(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x)
        return 2 * x, 3 * y

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_y: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * of_x + 0.1 * x, 3 * of_y


class Experts(nn.Module):
    """The gate is trained by its auxiliary loss; its logits are returned too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.up, self.head = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(x)
        hidden = self.up(x)
        if self.kind != "apart":
            hidden = hidden * scores.softmax(-1)
        if self.kind == "pair":
            hidden, scores = Pair.apply(hidden, scores)
        elif self.kind == "regularized":
            hidden = Regularized.apply(hidden)
        else:
            auxiliary = scores.softmax(-1).mean((0, 1)).square().sum()
            function = Scaled if self.kind == "scaled" else WithAuxiliary
            hidden = function.apply(hidden, 5 * auxiliary)
        logits = self.head(hidden)
        return hidden.square().mean(), logits, scores


_KINDS = ["gated", "scaled", "apart", "pair", "regularized"]
_USES = {
    "loss": lambda loss, logits, scores: loss,
    "logits": lambda loss, logits, scores: logits.square().sum(),
    "scores": lambda loss, logits, scores: scores.square().sum(),
    "all": lambda loss, logits, scores: loss + logits.square().sum() + scores.square().sum(),
}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Experts(kind).double()


def _x() -> Tensor:
    return torch.randn(2, 4, _WIDTH, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("kind", _KINDS)
def test_gradients_are_those_of_eager_code(
    kind: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "scale", None)
    eager = _model(kind)
    module: Any = sp_compiler.compile(copy.deepcopy(eager), tp=1, example_inputs=((_x(),), {}))
    assert Scaled.scale is None  # no fake tensor, with which the model itself would fail
    loss = _USES[use](*module(_x()))
    if use == "scores" and kind != "pair":  # they do not depend on the function
        with pytest.raises(UnsupportedError, match=r"\(test_reached.py:\d+ hidden = .*not linear"):
            loss.backward()
        return
    loss.backward()
    _USES[use](*eager(_x())).backward()
    assert_same_gradients(module, eager)


def test_a_tensor_that_was_stored_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "scale", torch.tensor(2.0))
    with pytest.raises(UnsupportedError, match=r"\(Scaled\) uses a tensor .* pass it to apply"):
        sp_compiler.compile(_model("scaled"), tp=1, example_inputs=((_x(),), {}))
    assert float(Scaled.scale) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind != "scaled"])
def test_gradients_of_two_ranks(kind: str) -> None:
    report = sp_compiler.verify(_model(kind), ((_x(),), {}), tp=2)
    assert report.ok, str(report)


class MinusHot(Regularized):
    """An integer that is subtracted, as in the gradient of a cross entropy."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad - F.one_hot(x.argmax(-1), _WIDTH)


class Doubled(Function):
    """Linear: where no gradient reaches it, zeros come out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(grad > 0, 2 * grad, grad / 3)


class TwoHeads(nn.Module):
    """Two calls of a function on one line, each before an output of its own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, v = (self.function(layer(x)) for layer in (self.first, self.second))
        return u.square().mean(), v.square().mean()


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("function", [Regularized, MinusHot, Doubled])
def test_calls_on_one_line_are_told_apart(function: Any, output: int) -> None:
    torch.manual_seed(0)
    eager = TwoHeads(function.apply).double()
    module: Any = sp_compiler.compile(copy.deepcopy(eager), tp=1)
    loss = module(_x())[output]
    if output and function is not Doubled:  # the first call is not reached
        with pytest.raises(UnsupportedError, match=r"u, v = .*not linear"):
            loss.backward()
        return
    loss.backward()
    eager(_x())[output].backward()
    assert_same_gradients(module, eager)
