"""Rows that a mask chooses: computed for all rows, with the numbers of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers import parity
from tests.helpers.normalized import OfWeights, captured_from, outputs, text
from tests.helpers.slow import slow
from tests.helpers.users import assert_same_gradients, num_compiled

_X = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_P = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _lines(function: Callable[..., Tensor], *args: Tensor) -> list[str]:
    return [line.strip() for line in text(captured_from(function, *args)).splitlines()]


def test_golden_boolean_index() -> None:
    def chosen(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        mask = x[:, 0] > 0
        y[mask] = x[mask].tanh()
        return y

    assert _lines(chosen, _X) == [
        "%0 = placeholder[args_0] : f64[3, 2]",
        "%1 = aten.zeros_like(%0, pin_memory=False) : f64[3, 2]",
        "%2 = aten.select.int(%0, 1, 0) : f64[3]",
        "%3 = aten.gt.Scalar(%2, 0) : bool[3]",
        "%4 = aten.reshape(%3, [3, 1]) : bool[3, 1]",
        "%5 = aten.where.ScalarOther(%4, %0, 0) : f64[3, 2]",
        "%6 = aten.tanh(%5) : f64[3, 2]",
        "%7 = aten.where.self(%4, %6, %1) : f64[3, 2]",
        "output(%7)",
    ]


def test_golden_places_of_tokens_and_slots() -> None:
    def chosen(x: Tensor, p: Tensor) -> Tensor:
        t, k = torch.where(p > 0)
        return x.index_add(0, t, x[t].tanh() * p[t, k, None])

    assert _lines(chosen, _X, _P) == [
        "%0 = placeholder[args_0] : f64[3, 2]",
        "%1 = placeholder[args_1] : f64[3, 4]",
        "%2 = aten.gt.Scalar(%1, 0) : bool[3, 4]",
        "%3 = aten.any.dims(%2, [1]) : bool[3]",
        "%4 = aten.reshape(%3, [3, 1]) : bool[3, 1]",
        "%5 = aten.where.ScalarOther(%4, %0, 0) : f64[3, 2]",
        "%6 = aten.tanh(%5) : f64[3, 2]",
        "%7 = aten.unsqueeze(%1, 2) : f64[3, 4, 1]",
        "%8 = aten.reshape(%2, [3, 4, 1]) : bool[3, 4, 1]",
        "%9 = aten.where.ScalarOther(%8, %7, 0) : f64[3, 4, 1]",
        "%10 = aten.where.ScalarOther(%8, %9, 0) : f64[3, 4, 1]",
        "%11 = aten.sum.dim_IntList(%10, [1]) : f64[3, 1]",
        "%12 = aten.mul.Tensor(%11, %6) : f64[3, 2]",
        "%13 = aten.where.ScalarOther(%4, %12, 0) : f64[3, 2]",
        "%14 = aten.add.Tensor(%0, %13) : f64[3, 2]",
        "output(%14)",
    ]


def test_golden_of_each_token_one_slot() -> None:
    def chosen(x: Tensor, p: Tensor) -> Tensor:
        w, c = p.topk(2)
        t, k = torch.where(c == 1)
        x = x.clone()
        x[t] += x[t].tanh() * w[t, k, None]
        return x

    assert _lines(chosen, _X, _P) == [
        "%0 = placeholder[args_0] : f64[3, 2]",
        "%1 = placeholder[args_1] : f64[3, 4]",
        "%2 = aten.topk(%1, 2) : (f64[3, 2], i64[3, 2])",
        "%3 = getitem(%2, 0) : f64[3, 2]",
        "%4 = getitem(%2, 1) : i64[3, 2]",
        "%5 = aten.eq.Scalar(%4, 1) : bool[3, 2]",
        "%6 = aten.clone(%0) : f64[3, 2]",
        "%7 = aten.any.dims(%5, [1]) : bool[3]",
        "%8 = aten.reshape(%7, [3, 1]) : bool[3, 1]",
        "%9 = aten.where.ScalarOther(%8, %6, 0) : f64[3, 2]",
        "%10 = aten.where.ScalarOther(%8, %6, 0) : f64[3, 2]",
        "%11 = aten.tanh(%10) : f64[3, 2]",
        "%12 = aten.unsqueeze(%3, 2) : f64[3, 2, 1]",
        "%13 = aten.reshape(%5, [3, 2, 1]) : bool[3, 2, 1]",
        "%14 = aten.where.ScalarOther(%13, %12, 0) : f64[3, 2, 1]",
        "%15 = aten.where.ScalarOther(%13, %14, 0) : f64[3, 2, 1]",
        "%16 = aten.sum.dim_IntList(%15, [1]) : f64[3, 1]",
        "%17 = aten.mul.Tensor(%11, %16) : f64[3, 2]",
        "%18 = aten.add.Tensor(%9, %17) : f64[3, 2]",
        "%19 = aten.where.self(%8, %18, %6) : f64[3, 2]",
        "output(%19)",
    ]


def test_golden_places_that_are_computed() -> None:
    def chosen(x: Tensor, p: Tensor) -> Tensor:
        t = torch.nonzero(p.flatten() > 0).squeeze(-1)
        return torch.zeros_like(x).index_add(0, t // 4, x[t // 4])

    assert _lines(chosen, _X, _P) == [
        "%0 = placeholder[args_0] : f64[3, 2]",
        "%1 = placeholder[args_1] : f64[3, 4]",
        "%2 = aten.reshape(%1, [12]) : f64[12]",
        "%3 = aten.gt.Scalar(%2, 0) : bool[12]",
        "%4 = aten.arange(12, device=device(type='cpu')) : i64[12]",
        "%5 = aten.zeros_like(%0, pin_memory=False) : f64[3, 2]",
        "%6 = aten.floor_divide(%4, 4) : i64[12]",
        "%7 = aten.floor_divide(%4, 4) : i64[12]",
        "%8 = aten.where.ScalarOther(%3, %7, 0) : i64[12]",
        "%9 = aten.index.Tensor(%0, [%8]) : f64[12, 2]",
        "%10 = aten.reshape(%3, [12, 1]) : bool[12, 1]",
        "%11 = aten.where.ScalarOther(%10, %9, 0) : f64[12, 2]",
        "%12 = aten.expand(%6, [12]) : i64[12]",
        "%13 = aten.where.ScalarOther(%3, %12, 0) : i64[12]",
        "%14 = aten.reshape(%13, [12]) : i64[12]",
        "%15 = aten.where.ScalarOther(%10, %11, 0) : f64[12, 2]",
        "%16 = aten.reshape(%15, [12, 2]) : f64[12, 2]",
        "%17 = aten.index_add(%5, 0, %14, %16) : f64[3, 2]",
        "output(%17)",
    ]


NEAR_MISSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a running sum": (lambda x, p: x[p[:, 0] > 0].cumsum(0).sum(), "not computed row by row"),
    "rows that are normalized": (
        lambda x, p: torch.zeros_like(x).index_put((p[:, 0] > 0,), x[p[:, 0] > 0].softmax(0)),
        "not computed row by row",
    ),
    "a pole": (
        lambda x, p: torch.zeros_like(x).index_put((p[:, 0] > 0,), 1 / x[p[:, 0] > 0]),
        "no finite value",
    ),
    "a power that is a pole": (
        lambda x, p: torch.zeros_like(x).index_put((p[:, 0] > 0,), x[p[:, 0] > 0] ** -2),
        "no finite value",
    ),
    "a power that is a root": (
        lambda x, p: torch.zeros_like(x).index_put((p[:, 0] > 0,), x[p[:, 0] > 0] ** 0.5),
        "no finite value",
    ),
    "rows that are normalized as one": (
        lambda x, p: torch.zeros_like(x[:, :1]).index_put(
            (p[:, 0] > 0,),
            F.layer_norm(x[None, :, 0][:, p[:, 0] > 0], x[p[:, 0] > 0].shape[:1]).reshape(-1, 1),
        ),
        "not computed row by row",
    ),
    "a root": (
        lambda x, p: torch.zeros_like(x).index_put((p[:, 0] > 0,), x[p[:, 0] > 0].sqrt()),
        "no finite value",
    ),
    "other rows": (
        lambda x, p: torch.zeros_like(x).index_put((p[:, 0] > 1,), x[p[:, 0] > 0]),
        "go back to other places",
    ),
    "another dim": (
        lambda x, p: torch.zeros(3, 3).double().index_add(
            1, torch.where(p[:, 0] > 0)[0], x.mT.new_ones(3, 3)[:, torch.where(p[:, 0] > 0)[0]]
        ),
        "go back to other places",
    ),
    "a scaled sum": (
        lambda x, p: x.index_add(0, (t := torch.where(p[:, 0] > 0)[0]), x[t], alpha=2),
        "go back to other places",
    ),
    "written several times": (
        lambda x, p: x.index_put((t := torch.where(p > 0)[0],), x[t]), "written several times",
    ),
    "the weights of two slots may be equal": (
        lambda x, p: x.index_put((t := torch.where(p.topk(2)[0] == 1)[0],), x[t]),
        "written several times",
    ),
    "their number": (
        lambda x, p: x.index_add(
            0, torch.where(p > 0)[0], x[torch.where(p > 0)[0]] / torch.where(p > 0)[0].shape[0]
        ),
        "may be their number",
    ),
    "merged with another dim": (
        lambda x, p: torch.zeros_like(x).index_put(
            (p[:, 0] > 0,), x[p[:, 0] > 0].reshape(-1).tanh().reshape(-1, 2)
        ),
        "split or merged",
    ),
    "returned": (lambda x, p: x[p[:, 0] > 0], "depends on the values in a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_with_their_reason(name: str) -> None:
    function, reason = NEAR_MISSES[name]
    with pytest.raises(CaptureError, match=reason + r"[\s\S]*self\.function\(\*args\)"):
        capture(OfWeights(function, _P), (_X,))


def test_rows_times_a_number() -> None:
    def scaled(x: Tensor, p: Tensor) -> Tensor:
        token, slot = torch.where(p > 0)
        return torch.zeros_like(x).index_add(0, token, x[token] * p[token, slot, None] * 0.5)

    captured = captured_from(scaled, _X, _P)
    torch.testing.assert_close(outputs(captured, _X, _P)[0], scaled(_X, _P), rtol=0, atol=1e-15)


def test_what_nobody_uses_is_no_obstacle() -> None:
    def unused(x: Tensor, p: Tensor) -> Tensor:
        x[p[:, 0] > 0].sum()
        return x.tanh()

    assert any("tanh" in line for line in _lines(unused, _X, _P))


class Expert(nn.Module):
    """A gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """Routes every token to two of three experts; ``mix(experts, x, weights, chosen)``."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return self.mix(self.experts, tokens, weights, chosen).view(x.shape).square().mean()


def _added_in_place(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As LitGPT does, and Mistral's reference."""
    y = torch.zeros_like(x)
    masks = (chosen.unsqueeze(-1) == torch.arange(len(experts))).permute(2, 0, 1)
    for mask, expert in zip(masks, experts, strict=True):
        t, k = torch.where(mask)
        y[t] += w[t, k, None] * expert(x[t])
    return y


def _index_add(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As transformers' Mixtral did, with an integer mask whose first dim is the slot."""
    y = torch.zeros_like(x)
    masks = F.one_hot(chosen, num_classes=len(experts)).permute(2, 1, 0)
    for mask, expert in zip(masks, experts, strict=True):
        k, t = torch.where(mask)
        rows = expert(x[None, t].reshape(-1, x.shape[-1])) * w[t, k, None]
        y.index_add_(0, t, rows.to(x.dtype))
    return y


def _repeated(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As DeepSeek does in training: tokens repeated for their slots, into memory that is empty."""
    flat = chosen.view(-1)
    x = x.repeat_interleave(2, dim=0)
    y = torch.empty_like(x)
    for number, expert in enumerate(experts):
        y[flat == number] = expert(x[flat == number])
    return (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(1)


def _by_slot(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for slot in range(2):
        for number, expert in enumerate(experts):
            mask = chosen[:, slot] == number
            y[mask] += expert(x[mask]) * w[mask][:, slot].unsqueeze(-1)
    return y


def _selected(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        routed = chosen == number
        t = routed.any(-1).nonzero().squeeze(-1)
        rows = expert(x.index_select(0, t)) * (w * routed).sum(-1)[t].unsqueeze(-1)
        y = y.index_add(0, t, rows)
    return y


def _scattered(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Slots numbered through; where they go back to is computed."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        places = torch.nonzero(chosen.flatten() == number).flatten()
        t = places // 2
        rows = expert(x[t]) * w.flatten()[places][:, None]
        y.scatter_add_(0, t[:, None].expand(-1, x.shape[-1]), rows)
    return y


MIXES = (_added_in_place, _index_add, _repeated, _by_slot, _selected, _scattered)
# The others are much alike, and a capture takes its time.
_FAST = (_added_in_place, _repeated)


def _case(mix: Callable[..., Tensor]) -> tuple[parity.Case, Experts, Tensor]:
    torch.manual_seed(0)
    model = Experts(mix).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    return parity.make_case(copy.deepcopy(model), {"x": x}), model, x.detach().requires_grad_()


@pytest.mark.parametrize("mix", [m if m in _FAST else slow(m) for m in MIXES])
def test_mixtures_of_experts_by_token_index(mix: Callable[..., Tensor]) -> None:
    case, model, x = _case(mix)
    loss = model(x)
    loss.backward()
    true = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert parity.gradient_error(case.grads, true) < 1e-13
    torch.testing.assert_close(case.outputs[0], loss.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(case.input_grads[0], x.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES[::2])
def test_mixtures_of_experts_are_sharded(mix: Callable[..., Tensor]) -> None:
    case, _, _ = _case(mix)
    for tp in (1, 2, 4) if mix in _FAST else (2,):
        parity.assert_parity(case, tp=tp)


def test_rows_that_no_mask_chooses_leave_no_trace() -> None:
    """Infinite on the rows of others, forward and backward."""

    def chosen(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        mask = x[:, 0] < 100
        y[mask] = x[mask] * x[mask]
        return y

    x = torch.tensor([[1.0, 2.0], [1e200, 1e200]], dtype=torch.float64)
    captured = captured_from(chosen, x)
    x.requires_grad_()
    (y,) = outputs(captured, x)
    assert y.tolist() == [[1.0, 4.0], [0.0, 0.0]]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("outside", [math.nan, math.inf, 1e110])
def test_rows_that_no_mask_chooses_leave_no_trace_in_weights(outside: float) -> None:
    """Zero times NaN would be NaN in the gradient of a weight; the cube of 1e110 overflows."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            mask = x[:, 0].abs() < 100
            y = torch.zeros_like(x)
            rows = x[mask]
            y[mask] = self.linear(rows * rows * rows)
            return y

    eager = Chosen().double()
    module = sp_compiler.compile(copy.deepcopy(eager), tp=1)
    x = torch.tensor([[1.0, 2.0], [outside, outside], [3.0, 1.0]], dtype=torch.float64)
    (eager(x).square() + module(x).square()).sum().backward()
    for parameter, other in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_one_program_for_all_further_sizes() -> None:
    torch.manual_seed(0)
    eager = Experts(_added_in_place).double()
    module = sp_compiler.compile(copy.deepcopy(eager), tp=1)
    for shape in ((2, 4, 8), (2, 5, 8), (3, 7, 8), (2, 9, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        losses = module(x), eager(x)
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        sum(losses).backward()
    assert_same_gradients(module, eager)
    assert num_compiled(module) == 2
