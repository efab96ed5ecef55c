"""Autocast casts what it casts in eager, once, wherever it is switched on or off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.verification.simulate import simulate_step
from tests.helpers.parity import SEED
from tests.helpers.slow import slow_but

_WIDTH = 8
Product = Callable[[Tensor, Tensor], Tensor]


class _Matmul(Function):
    """A product inside of a function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)
        return grad @ weight.mT, x.flatten(0, 1).mT @ grad.flatten(0, 1)


_PRODUCTS: dict[str, Product] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: nn.functional.linear(x, w.mT),
    "function": lambda x, w: _Matmul.apply(x, w),
    "einsum": lambda x, w: torch.einsum("btd,df->btf", x, w),
    "einsum, outer": lambda x, w: torch.einsum("btd,df->btdf", x, w).sum(2),
    "einsum, sums": lambda x, w: torch.einsum("btd,ef->btf", x, w),
    "einsum, three": lambda x, w: torch.einsum("btd,de,ef->btf", x, w, w),
    "einsum, dots": lambda x, w: torch.einsum("...d,df", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "inner": lambda x, w: torch.inner(x, w.mT),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x.flatten(0, 1), w, w]),
}


class _Model(nn.Module):
    def __init__(self, product: Product, inside: bool | None) -> None:
        super().__init__()
        self.product, self.inside = product, inside
        self.weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH))
        self.last = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.inside is None:
            y = self.product(x, self.weight)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
                y = self.product(x, self.weight)
        return self.last(y.float()), y


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("around", "inside", "tp"), [(True, None, 2), (True, False, 1), (False, True, 2)]
)
@pytest.mark.parametrize("name", slow_but(list(_PRODUCTS)[::2], _PRODUCTS))
def test_as_in_eager(name: str, around: bool, inside: bool | None, tp: int) -> None:
    """In eager a product that is not to be cast is not; bfloat16 would be off by a percent."""
    torch.manual_seed(0)
    model, x = _Model(_PRODUCTS[name], inside), torch.randn(2, 3, _WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        expected = model(x)
        options = CompileOptions(tp=tp, outputs="replicate")
        compiled = build(model, (x,), {}, options)
        step = simulate_step(compiled, dict(model.named_parameters()), {}, [x], SEED)
    for actual, true in zip(step.outputs, expected, strict=True):
        assert actual.dtype == true.dtype
        tolerance = 1e-5 if around and true.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, true, rtol=tolerance, atol=tolerance)


class _Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).flatten(0, 1)
        loss = nn.functional.nll_loss(logits.log_softmax(-1), labels)
        return loss + 0.1 * logits.logsumexp(-1).square().mean()


def test_a_loss_of_classes_is_in_float32() -> None:
    torch.manual_seed(0)
    model, inputs = _Classes(), [torch.randn(2, 3, _WIDTH), torch.arange(6)]
    with torch.autocast("cpu", torch.bfloat16):
        true = model(*inputs)
        compiled = build(model, tuple(inputs), {}, CompileOptions())
    assert true.dtype == torch.float32
    (loss,) = simulate_step(compiled, dict(model.named_parameters()), {}, inputs, SEED).outputs
    torch.testing.assert_close(loss, true)


def test_a_backward_under_autocast_casts_no_more_than_forward() -> None:
    """Products in float32, and the sum of two gradients of one weight, stay in float32."""
    torch.manual_seed(0)
    model, x = _Model(_PRODUCTS["einsum, three"], inside=False), torch.randn(2, 3, _WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = build(model, (x,), {}, CompileOptions(tp=2))
    grads = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            step = simulate_step(compiled, dict(model.named_parameters()), {}, [x], SEED)
        grads.append(step.grads["weight"])
    outside, inside = grads
    assert outside is not None
    assert inside is not None
    assert outside.dtype == torch.float32
    assert torch.equal(inside, outside)
