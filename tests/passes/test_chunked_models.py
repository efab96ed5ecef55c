"""Models with a loss head or attention in chunks: numbers, bytes of the plan, sizes that stay
open."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from tests.helpers import parity
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.slow import slow


class Model(nn.Module):
    """Shifted labels, as in transformers; a head with a bias, ``tied`` to the embedding."""

    def __init__(self, classes: int, tied: bool, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(F.gelu(self.up(x)))
        logits = torch.tanh(self.head(x) / 2).float()[:, :-1] * 2
        return self.loss(logits, ids[:, 1:])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)


class Picked(Model):
    """A loss written by hand."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        mask = labels != 3
        return -(picked * mask).sum() / mask.sum()


def _inputs(classes: int, length: int = 9) -> Tensor:
    return torch.randint(classes, (2, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("kind", "tp", "tied", "recompute"),
    [
        (Model, 2, True, "selective"),
        *(
            slow(kind, tp, tied, recompute)
            for kind, tp, tied, recompute in (
                (Model, 1, True, "none"),
                (Model, 4, False, "full"),
                (Model, 4, True, "none"),
                (Picked, 1, True, "selective"),
                (Picked, 2, False, "selective"),
            )
        ),
    ],
)
def test_proven_on_simulated_ranks(kind: type[Model], tp: int, tied: bool, recompute: str) -> None:
    ids = _inputs(509)  # classes that do not divide; of fewer the product would be row-parallel
    model = kind(509, tied).double()
    options: Any = {"tp": tp, "recompute": recompute, "loss_chunks": 3}
    report = sp_compiler.verify(model, ((ids,), {}), **options)
    assert report.ok, report
    assert report.worst < 1e-10


@pytest.mark.parametrize("shape", [(), (1,), (61,)])
def test_a_trained_factor_of_the_logits(shape: tuple[int, ...]) -> None:
    """Its gradient sums over all tokens, and all classes or none."""

    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__(61, tied=False)
            self.factor = nn.Parameter(torch.full(shape, 0.7))

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.head(self.tokens(ids)) * self.factor
            return self.loss(logits[:, :-1], ids[:, 1:])

    inputs: Any = ((_inputs(61),), {})
    report = sp_compiler.verify(Scaled().double(), inputs, tp=2, loss_chunks=3)
    assert report.ok, report
    assert report.worst < 1e-10
    plan = sp_compiler.plan(Scaled(), inputs, tp=2, loss_chunks=3)
    (chunked,) = (each for each in plan.passes if each.name == "chunk")
    assert chunked.kinds == {"loss in 3 chunks": 1}


@pytest.mark.parametrize("num_ignored", [1, 5, 8])
def test_on_one_device(num_ignored: int) -> None:
    """With no label at all in some chunks of four rows, and in all: NaN, as in eager."""
    model, ids = Model(61, tied=True).double(), _inputs(61)[:1]
    ids[:, 1 : 1 + num_ignored] = 3
    module = sp_compiler.compile(copy.deepcopy(model), tp=1, loss_chunks=2)
    losses = [each(ids) for each in (module, model)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0, equal_nan=True)
    for loss in losses:
        loss.backward(torch.tensor(2.5))
    for got, expected in zip(module.parameters(), model.parameters(), strict=True):
        assert got.grad is not None
        # The model casts its logits to float32.
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-8)


class _TwoHeads(nn.Module):
    """Two wide products whose results meet, as in a gate."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.value = nn.Linear(6, 12, bias=False)
        self.gate = nn.Linear(6, 12, bias=False)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        return self.meet(self.value(x), self.gate(x).sin())


def _squares(value: Tensor, gate: Tensor) -> Tensor:
    return (value * gate).sum() + (value * gate).square().sum()


def _own_and_common(value: Tensor, gate: Tensor) -> Tensor:
    return (value * gate).sum() + gate.square().sum()


def _rows(value: Tensor, gate: Tensor) -> Tensor:
    value = value.exp()
    return (value.sum(-1) * gate.sum(-1)).sum() + (value * gate).sum()


@pytest.mark.parametrize("meet", [_squares, _own_and_common, _rows])
def test_heads_that_meet_are_cut_once(meet: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    found = parity.make_case(_TwoHeads(meet).double(), {"x": x})
    parity.assert_parity(found, tp=1, loss_chunks=2)


def test_the_plan_chooses_chunks_by_the_peak_on_one_device() -> None:
    ids = torch.zeros(2, 2049, dtype=torch.int64, device="meta")
    one, auto = (
        sp_compiler.plan(Model(4096, True).to("meta"), ((ids,), {}), tp=1, loss_chunks=count)
        for count in (1, "auto")
    )
    assert auto.activation_peak_bytes < one.activation_peak_bytes / 2
    assert auto.work.hardware_flops - one.work.hardware_flops == 2 * 2 * 2048 * 16 * 4096


def test_the_plan_chooses_chunks_by_the_peak() -> None:
    model, ids = (
        Model(4096, True).to("meta"),
        torch.zeros(2, 2049, dtype=torch.int64, device="meta"),
    )
    one, auto = (
        sp_compiler.plan(model, ((ids,), {}), tp=2, loss_chunks=count) for count in (1, "auto")
    )
    # Of 4096 rows: four chunks of the least size.
    assert {each.name: each.kinds for each in auto.passes}["chunk"] == {
        "loss in 2 chunks": 1,
        "loss in 4 chunks": 1,
    }
    assert auto.activation_peak_bytes < one.activation_peak_bytes / 2
    # The product that is run twice.
    assert auto.work.hardware_flops - one.work.hardware_flops == 2 * 2 * 2048 * 16 * 2048
    assert auto.work.model_flops == one.work.model_flops


@pytest.mark.slow
def test_a_budget_chooses_chunks() -> None:
    model, ids = (
        Model(4096, True).to("meta"),
        torch.zeros(2, 2049, dtype=torch.int64, device="meta"),
    )
    peak = sp_compiler.plan(model, ((ids,), {}), tp=2, loss_chunks=1).activation_peak_bytes
    options: Any = {"recompute": "auto", "memory_budget": peak // 2}
    assert sp_compiler.plan(model, ((ids,), {}), tp=2, **options).activation_peak_bytes <= peak // 2
    with pytest.raises(sp_compiler.ArgumentError, match="memory_budget"):
        sp_compiler.plan(model, ((ids,), {}), tp=2, loss_chunks=1, **options)


@pytest.mark.parametrize("name", ["loss_chunks", "attention_chunks"])
@pytest.mark.parametrize("value", [0, True, "many"])
def test_a_wrong_number_of_chunks_is_refused(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(sp_compiler.ArgumentError, match=rf'{name}=.*positive int or "auto"'):
        sp_compiler.plan(nn.Linear(2, 2), ((torch.zeros(1, 2),), {}), tp=1, **options)


def test_one_device_does_not_leave_the_rows_of_a_head_open() -> None:
    ids, options = _inputs(61), CompileOptions(tp=1, loss_chunks=3)
    with pytest.warns(UserWarning, match="needs a fixed number of rows"):
        program = build(Model(61, True), (ids,), {}, options, open_dims=True)
    assert program.program.sizes is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "options", "falls_back"),
    [
        (64, {}, True),
        (4096, {}, False),  # beside which the logits are small
        (64, {"recompute": "none"}, False),
        (64, {"loss_chunks": 1}, False),
    ],
)
def test_sizes_stay_open_where_nothing_is_cut(
    inner: int, options: dict[str, Any], falls_back: bool
) -> None:
    model = Model(64, tied=False)
    model.up, model.down = nn.Linear(16, inner), nn.Linear(inner, 16)
    module = sp_compiler.compile(model, tp=1, **options)
    for length in (5, 7, 9):  # too short for chunks
        module(_inputs(64, length))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (1300, 1200):
            module(_inputs(64, length))
    assert any("every size" in str(each.message) for each in caught) == falls_back


class Attention(nn.Module):
    """Causal attention with dropout, of ``heads`` in pairs that share keys if ``heads`` is even."""

    def __init__(self, heads: int, width: int = 24) -> None:
        super().__init__()
        self.heads, self.kv = heads, heads // 2 if heads % 2 == 0 else heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, self.kv * width // heads) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for proj, heads in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        )
        grouped = {"enable_gqa": True} if self.kv < self.heads else {}
        causal = mask is None
        context = F.scaled_dot_product_attention(q, k, v, mask, 0.25, causal, **grouped)
        return self.o(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("heads", "tp", "recompute"),
    [
        (4, 2, "selective"),
        *(
            slow(heads, tp, recompute)
            for heads, tp, recompute in ((3, 2, "full"), (3, 2, "none"), (4, 1, "attention"))
        ),
    ],
)
def test_attention_is_proven_on_simulated_ranks(heads: int, tp: int, recompute: str) -> None:
    x = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    options: Any = {"tp": tp, "recompute": recompute, "attention_chunks": 4}
    report = sp_compiler.verify(Attention(heads).double(), ((x,), {}), **options)
    assert report.ok, report
    assert report.worst < 1e-10


@pytest.mark.parametrize("recompute", ["selective", *map(slow, ("full", "none"))])
def test_the_plan_chooses_chunks_of_attention_by_the_peak(recompute: str) -> None:
    model, x = Attention(4).to("meta"), torch.zeros(2, 1024, 24, device="meta", requires_grad=True)
    one, auto = (
        sp_compiler.plan(model, ((x,), {}), tp=1, recompute=recompute, attention_chunks=count)
        for count in (1, "auto")
    )
    scores = 2 * 4 * 1024 * 1024 * 4
    assert one.activation_peak_bytes > 3 * scores
    assert auto.work.model_flops == one.work.model_flops
    if recompute == "none":  # nothing is recomputed where that is asked for
        assert auto.activation_peak_bytes == one.activation_peak_bytes
        return
    assert auto.activation_peak_bytes < 1.2 * scores
    more = auto.work.hardware_flops - one.work.hardware_flops
    # What backward recomputes anyway; of "full", which recomputes the context, once more.
    assert more == (2 * 2 * 1024 * 1024 * 24 if recompute == "full" else 0)


def _train() -> list[Tensor]:
    ids, results = _inputs(512), []
    for chunks in (1, 3):
        torch.manual_seed(5)
        module = sp_compiler.compile(Model(512, True).double(), tp=2, loss_chunks=chunks)
        for length in (9, 7, 8):  # the second size on, sizes are open
            loss = module(ids[:, :length])
            loss.backward()
        results += [loss.detach(), *(p.grad.full_tensor() for p in module.parameters())]
        # Three heads of two ranks: one of them is padding.
        module = sp_compiler.compile(Attention(3).double(), tp=2, attention_chunks=chunks)
        output = module(torch.linspace(-1, 1, 2 * 7 * 24).double().view(2, 7, 24))
        output.square().sum().backward()
        results += [output.detach(), *(p.grad.full_tensor() for p in module.parameters())]
    return results


@pytest.mark.slow
def test_on_two_ranks() -> None:
    for results in run_rehearsed(2, _train):
        half = len(results) // 2
        for got, expected in zip(results[half:], results[:half], strict=True):
            # The model casts its logits to float32.
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
