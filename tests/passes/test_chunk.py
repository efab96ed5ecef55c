"""Loss heads in chunks of rows: the graph, near-misses, numbers, bytes of the plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.compiler import build
from sp_compiler.ir.text import render
from sp_compiler.ops.communicator import Communicator, running_on
from sp_compiler.options import CompileOptions
from sp_compiler.passes.chunks.chunk import chunk
from sp_compiler.passes.simplify import simplify
from sp_compiler.trace.joint import JointGraph, trace_joint
from tests.helpers.ranks import run_on_ranks
from tests.helpers.regions import region_of

_sp = torch.ops.sp_compiler
N, H, V = 7, 3, 5
Loss = Callable[[Tensor, Tensor], Any]


class Head(nn.Module):
    """A product and ``loss(logits, y)``, on one rank's operators."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, w: Tensor, y: Tensor) -> Any:
        result = self.loss(F.linear(x, w), y)
        return result if isinstance(result, tuple) else (result,)


def nll(logits: Tensor, y: Tensor) -> Tensor:
    return _sp.vocab_nll(logits, y, -100, V, 1)[0]  # type: ignore[no-any-return]


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    weights = torch.arange(V, dtype=logits.dtype) + 0.5
    rows = _sp.vocab_smoothed_nll(logits, y, weights, -100, V, 0.1, 1)[0]
    return rows.square().sum()  # type: ignore[no-any-return]


def softcapped(logits: Tensor, y: Tensor) -> Tensor:
    """As Gemma-2 has it, on tokens that are not flattened yet."""
    tokens = torch.tanh(logits.view(1, N, V) / 3) * 3
    return nll(tokens.float().double().view(N, V), y).mean()


def with_penalty(logits: Tensor, y: Tensor) -> Tensor:
    penalty = _sp.vocab_logsumexp(logits.view(1, N, V), V, 1).square().mean()
    return nll(logits, y).mean() + 1e-2 * penalty


def by_log_softmax(logits: Tensor, y: Tensor) -> Tensor:
    rows = _sp.vocab_logsumexp(logits, V, 1)
    return nll(logits - rows.unsqueeze(-1), y).mean()


def scaled_to_sum_one(logits: Tensor, y: Tensor) -> Tensor:
    """Of tokens that are not flattened yet; its gradient sums over dim 2, as counted in front."""
    tokens = logits.view(1, N, V).exp()
    return nll((tokens / tokens.sum(-1, keepdim=True)).view(N, V), y).mean()


def cross_entropy(**options: Any) -> Loss:
    """The loss of classes that no rank shards, with weights of the classes."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        weights = torch.arange(V, dtype=logits.dtype) + 0.5
        return F.cross_entropy(logits, y, weights, **options)

    return loss


def joint_of(loss: Loss, wide: int = V) -> JointGraph:
    x, w = torch.zeros(N, H).double(), torch.zeros(wide, H).double()
    y = torch.zeros(N, dtype=torch.int64)
    grads = [True, True, False]
    region = region_of(Head(loss), x, w, y, kinds=["call", "param", "input"], requires_grad=grads)
    joint = trace_joint(region)
    simplify(joint.graph)
    return joint


def chunked(loss: Loss, count: int) -> tuple[JointGraph, JointGraph, PassReport]:
    joint = joint_of(loss)
    before = render(joint.graph)
    with reporting(PassReport(Pass.CHUNK)) as report:
        (result,) = chunk(joint, 1, (count,))
    assert render(joint.graph) == before
    result.graph.lint()
    return joint, result, report


def run(joint: JointGraph) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((N, H), (V, H)))
    y = torch.randint(V, (N,), generator=generator)
    y[2] = -100
    shapes = [tuple(tangent.meta["val"].shape) for tangent in joint.tangents]
    tangents = [torch.full(shape, 0.7, dtype=torch.float64) for shape in shapes]
    with running_on(Communicator(None, 0, 1)):
        return fx.GraphModule({}, joint.graph)(x, w, y, *tangents)


GOLDEN = """\
%0 = placeholder[x] : f64[7, 3]
%1 = placeholder[w] : f64[5, 3]
%2 = placeholder[y] : i64[7]
%3 = placeholder[grad_out0] : f64[]
%4 = aten.slice.Tensor(%0, 0, 0, 3) : f64[3, 3]
%5 = aten.linear(%4, %1) : f64[3, 5]
%6 = aten.slice.Tensor(%2, 0, 0, 3) : i64[3]
%7 = sp_compiler.vocab_nll(%5, %6, -100, 5, 1) : (f64[3], f64[3])
%8 = getitem(%7, 0) : f64[3]
%9 = getitem(%7, 1) : f64[3]
%10 = aten.slice.Tensor(%0, 0, 3, 7) : f64[4, 3]
%11 = aten.linear(%10, %1) : f64[4, 5]
%12 = aten.slice.Tensor(%2, 0, 3, 7) : i64[4]
%13 = sp_compiler.vocab_nll(%11, %12, -100, 5, 1) : (f64[4], f64[4])
%14 = getitem(%13, 0) : f64[4]
%15 = getitem(%13, 1) : f64[4]
%16 = aten.cat([%8, %14], 0) : f64[7]
%17 = aten.cat([%9, %15], 0) : f64[7]
%18 = aten.sum(%16) : f64[]
%19 = aten.expand(%3, [7]) : f64[7]
%20 = aten.slice.Tensor(%19, 0, 0, 3) : f64[3]
%21 = aten.slice.Tensor(%17, 0, 0, 3) : f64[3]
%22 = sp_compiler.vocab_nll_backward(%20, %5, %6, %21, -100, 5, 1) : f64[3, 5]
%23 = aten.t(%22) : f64[5, 3]
%24 = aten.new_zeros(%23, [5, 3]) : f64[5, 3]
%25 = sp_compiler.add_product(%24, %23, %4, 1) : f64[5, 3]
%26 = aten.new_zeros(%22, [7, 3]) : f64[7, 3]
%27 = aten.mm(%22, %1) : f64[3, 3]
%28 = sp_compiler.write_rows(%26, %27, 0, 0, 1) : f64[7, 3]
%29 = aten.slice.Tensor(%19, 0, 3, 7) : f64[4]
%30 = aten.slice.Tensor(%17, 0, 3, 7) : f64[4]
%31 = sp_compiler.vocab_nll_backward(%29, %11, %12, %30, -100, 5, 1) : f64[4, 5]
%32 = aten.t(%31) : f64[5, 4]
%33 = sp_compiler.add_product(%25, %32, %10, 1) : f64[5, 3]
%34 = aten.mm(%31, %1) : f64[4, 3]
%35 = sp_compiler.write_rows(%28, %34, 0, 3, 1) : f64[7, 3]
output(%18, %35, %33, None)\
"""


def test_the_graph_has_a_copy_of_the_head_for_each_chunk() -> None:
    _, result, report = chunked(lambda logits, y: nll(logits, y).sum(), 2)
    assert render(result.graph) == GOLDEN
    assert report.kinds == {"in 2 chunks": 1}
    again = chunk(result, 1, (2,))
    assert [render(each.graph) for each in again] == [GOLDEN]


LOSSES: dict[str, Loss] = {
    "nll": lambda logits, y: nll(logits, y).mean(),
    "rows returned": nll,
    "weights and smoothing": smoothed,
    "softcapped": softcapped,
    "penalty on logsumexp": with_penalty,
    "log softmax": by_log_softmax,
    "scaled to sum one": scaled_to_sum_one,
    "cross entropies": lambda x, y: tuple(
        cross_entropy(**options)(x, y)
        for options in ({"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"})
    ),
    "scaled, other losses beside": lambda x, y: (nll(0.3 * x, y).mean(), y.sum()),
}


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_give_the_same_numbers(name: str, count: int) -> None:
    joint, result, report = chunked(LOSSES[name], count)
    assert report.kinds == {f"in {count} chunks": 1}, report.declined
    large = [n for n in result.graph.nodes if n.op == "call_function" and _rows(n) == (N, V)]
    assert not large, "logits of all rows"
    for got, expected in zip(run(result), run(joint), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)


ONE_DEVICE_GOLDEN = """\
%0 = placeholder[x] : f64[7, 3]
%1 = placeholder[w] : f64[5, 3]
%2 = placeholder[y] : i64[7]
%3 = placeholder[grad_out0] : f64[]
%4 = aten.arange(5, dtype=torch.float64, device=device(type='cpu'), pin_memory=False) : f64[5]
%5 = aten.add.Tensor(%4, 0.5) : f64[5]
%6 = aten.slice.Tensor(%0, 0, 0, 3) : f64[3, 3]
%7 = aten.linear(%6, %1) : f64[3, 5]
%8 = aten._log_softmax(%7, 1, False) : f64[3, 5]
%9 = aten.slice.Tensor(%2, 0, 0, 3) : i64[3]
%10 = aten.nll_loss_forward(%8, %9, %5, 0, -100) : (f64[3], f64[])
%11 = getitem(%10, 0) : f64[3]
%12 = getitem(%10, 1) : f64[]
%13 = aten.slice.Tensor(%0, 0, 3, 7) : f64[4, 3]
%14 = aten.linear(%13, %1) : f64[4, 5]
%15 = aten._log_softmax(%14, 1, False) : f64[4, 5]
%16 = aten.slice.Tensor(%2, 0, 3, 7) : i64[4]
%17 = aten.nll_loss_forward(%15, %16, %5, 0, -100) : (f64[4], f64[])
%18 = getitem(%17, 0) : f64[4]
%19 = getitem(%17, 1) : f64[]
%20 = aten.cat([%11, %18], 0) : f64[7]
%21 = aten.add.Tensor(%12, %19) : f64[]
%22 = aten.sum.dim_IntList(%20, [0], dtype=torch.float64) : f64[]
%23 = aten.ne.Scalar(%2, -100) : bool[7]
%24 = aten.where.ScalarOther(%23, %2, 0) : i64[7]
%25 = aten.index.Tensor(%5, [%24]) : f64[7]
%26 = aten.where.ScalarOther(%23, %25, 0) : f64[7]
%27 = aten.sum.dim_IntList(%26, [0], dtype=torch.float64) : f64[]
%28 = aten.div.Tensor(%22, %27) : f64[]
%29 = aten.div.Tensor(%3, %27) : f64[]
%30 = aten.expand(%29, [7]) : f64[7]
%31 = aten.slice.Tensor(%30, 0, 0, 3) : f64[3]
%32 = aten.nll_loss_backward(%31, %8, %9, %5, 0, -100, %21) : f64[3, 5]
%33 = aten._log_softmax_backward_data(%32, %8, 1, torch.float64) : f64[3, 5]
%34 = aten.t(%33) : f64[5, 3]
%35 = aten.new_zeros(%34, [5, 3]) : f64[5, 3]
%36 = sp_compiler.add_product(%35, %34, %6, 1) : f64[5, 3]
%37 = aten.new_zeros(%33, [7, 3]) : f64[7, 3]
%38 = aten.mm(%33, %1) : f64[3, 3]
%39 = sp_compiler.write_rows(%37, %38, 0, 0, 1) : f64[7, 3]
%40 = aten.slice.Tensor(%30, 0, 3, 7) : f64[4]
%41 = aten.nll_loss_backward(%40, %15, %16, %5, 0, -100, %21) : f64[4, 5]
%42 = aten._log_softmax_backward_data(%41, %15, 1, torch.float64) : f64[4, 5]
%43 = aten.t(%42) : f64[5, 4]
%44 = sp_compiler.add_product(%36, %43, %13, 1) : f64[5, 3]
%45 = aten.mm(%42, %1) : f64[4, 3]
%46 = sp_compiler.write_rows(%39, %45, 0, 3, 1) : f64[7, 3]
output(%28, %46, %44, None)\
"""


def test_a_mean_is_divided_by_the_weights_of_all_chunks() -> None:
    _, result, _ = chunked(cross_entropy(), 2)
    assert render(result.graph) == ONE_DEVICE_GOLDEN


def _rows(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta["val"], "shape", ()))


RETURNED = "the logits are returned: they must exist as a whole"
MIXED = "its rows depend on each other"
NEAR_MISSES: dict[str, tuple[Loss, list[str]]] = {
    "logits returned": (lambda x, y: (nll(x, y).mean(), x), [RETURNED]),
    "tanh of logits returned": (lambda x, y: (nll(x, y).mean(), x.tanh()), [RETURNED]),
    "a softmax over rows": (lambda x, y: nll(x + x.softmax(0), y).mean(), [MIXED]),
    "a sum over rows goes back into them": (lambda x, y: nll(x - x.sum(0), y).mean(), [MIXED]),
    "more than a number per row": (lambda x, y: x @ x.new_ones(V, 2), []),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    loss, reasons = NEAR_MISSES[name]
    joint, result, report = chunked(loss, 2)
    assert render(result.graph) == render(joint.graph)
    assert [each.reason for each in report.declined] == reasons


def test_a_product_that_narrows_is_no_head() -> None:
    joint = joint_of(lambda x, y: x.logsumexp(-1), wide=H)
    assert chunk(joint, 1, (2,)) == [joint]
    assert chunk(joint, 1, None) == [joint]


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
            pytest.param(kind, tp, tied, recompute, marks=pytest.mark.slow)
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
        "in 2 chunks": 1,
        "in 4 chunks": 1,
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


@pytest.mark.parametrize("value", [0, True, "many"])
def test_a_wrong_number_of_chunks_is_refused(value: Any) -> None:
    with pytest.raises(sp_compiler.ArgumentError, match=r'loss_chunks=.*positive int or "auto"'):
        sp_compiler.plan(nn.Linear(2, 2), ((torch.zeros(1, 2),), {}), tp=1, loss_chunks=value)


def test_one_device_does_not_leave_the_rows_of_a_head_open() -> None:
    ids, options = _inputs(61), CompileOptions(tp=1, loss_chunks=3)
    with pytest.warns(UserWarning, match="needs to know their number"):
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


def _train() -> list[Tensor]:
    ids, results = _inputs(512), []
    for chunks in (1, 3):
        torch.manual_seed(5)
        module = sp_compiler.compile(Model(512, True).double(), tp=2, loss_chunks=chunks)
        for length in (9, 7, 8):  # the second size on, sizes are open
            loss = module(ids[:, :length])
            loss.backward()
        results += [loss.detach(), *(p.grad.full_tensor() for p in module.parameters())]
    return results


@pytest.mark.slow
def test_on_two_ranks() -> None:
    for results in run_on_ranks(2, _train):
        half = len(results) // 2
        for got, expected in zip(results[half:], results[:half], strict=True):
            # The model casts its logits to float32.
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
