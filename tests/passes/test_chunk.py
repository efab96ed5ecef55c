"""Loss heads in chunks of rows: the graph, near-misses, numbers, bytes of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.text import render
from sp_compiler.ops.communicator import Communicator, running_on
from sp_compiler.passes.chunks.chunk import LEAST_ROWS, chunk
from sp_compiler.passes.simplify import simplify
from sp_compiler.trace.joint import JointGraph, trace_joint
from tests.goldens import check_golden
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


def joint_of(loss: Loss, wide: int = V, rows: int = N) -> JointGraph:
    x, w = torch.zeros(rows, H).double(), torch.zeros(wide, H).double()
    y = torch.zeros(rows, dtype=torch.int64)
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


@pytest.mark.parametrize(
    ("golden", "loss"),
    [
        ("sharded_vocabulary", lambda logits, y: nll(logits, y).sum()),
        # Its mean is divided by the weights of all chunks.
        ("one_device", cross_entropy()),
    ],
)
def test_the_graph_has_a_copy_of_the_head_for_each_chunk(golden: str, loss: Loss) -> None:
    _, result, report = chunked(loss, 2)
    text = render(result.graph)
    check_golden(f"chunk/{golden}.txt", text)
    assert report.kinds == {"in 2 chunks": 1}
    again = chunk(result, 1, (2,))
    assert [render(each.graph) for each in again] == [text]


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


def _rows(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta["val"], "shape", ()))


RETURNED = "the logits are returned: they must exist in full"
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


def test_a_product_of_few_rows_beside_the_head_does_not_count() -> None:
    def loss(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nll(logits, y).mean(), y[:2, None].double() @ torch.ones(1, V, dtype=torch.float64)

    assert len(chunk(joint_of(loss, rows=2 * LEAST_ROWS), 1, None)) == 2
