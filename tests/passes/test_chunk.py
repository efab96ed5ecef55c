"""Loss heads and attention in chunks of rows: the graph, near-misses, numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.program import RefKind
from sp_compiler.ir.text import render
from sp_compiler.ops.communicator import Communicator, running_on
from sp_compiler.passes.chunks.chunk import chunk
from sp_compiler.passes.chunks.counts import LEAST_QUERIES, LEAST_ROWS
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


def divided_over_ranks(logits: Tensor, y: Tensor) -> Tensor:
    """As a softmax that is written out, of classes that ranks share."""
    powers = logits.exp()
    sums = _sp.convert(powers.sum(-1, keepdim=True), "P", "I", 1)
    return nll(powers / sums, y).mean()


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


def run(joint: JointGraph, rows: int = N) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((rows, H), (V, H)))
    y = torch.randint(V, (rows,), generator=generator)
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
    assert report.kinds == {"loss in 2 chunks": 1}
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
    "divided over ranks": divided_over_ranks,
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
    assert report.kinds == {f"loss in {count} chunks": 1}, report.declined
    large = [n for n in result.graph.nodes if n.op == "call_function" and _rows(n) == (N, V)]
    assert not large, "logits of all rows"
    for got, expected in zip(run(result), run(joint), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)


def test_what_is_expanded_over_tokens_is_cut() -> None:
    """A number for each of two sequences, as of a dropped path: its rows are no view."""

    def scaled(logits: Tensor, y: Tensor) -> Tensor:
        scale = torch.arange(1, 3, dtype=logits.dtype).view(2, 1, 1).expand(2, 4, 1)
        return nll((logits.view(2, 4, V) * scale).view(8, V), y).mean()

    joint = joint_of(scaled, rows=8)
    (result,) = chunk(joint, 1, (3,))
    for got, expected in zip(run(result, 8), run(joint, 8), strict=True):
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


def test_similarities_of_rows_stay() -> None:
    """A chunk of the product would read some rows of one operand, and all of them."""

    class Similarities(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (F.linear(x, x).logsumexp(-1).mean(),)

    x = torch.randn(N, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    region = region_of(Similarities(), x, kinds=["call"], requires_grad=[True])
    joint = trace_joint(region)
    simplify(joint.graph)
    (result,) = chunk(joint, 1, (2,))
    assert render(result.graph) == render(joint.graph)


def test_a_product_that_narrows_is_no_head() -> None:
    joint = joint_of(lambda x, y: x.logsumexp(-1), wide=H)
    assert chunk(joint, 1, (2,)) == [joint]
    assert chunk(joint, 1, None) == [joint]


def test_a_product_of_few_rows_beside_the_head_does_not_count() -> None:
    def loss(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nll(logits, y).mean(), y[:2, None].double() @ torch.ones(1, V, dtype=torch.float64)

    assert len(chunk(joint_of(loss, rows=2 * LEAST_ROWS), 1, None)) == 2


B, A, S, D = 2, 2, 7, 3
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Attention(nn.Module):
    """Explicit attention: ``attend(scores, v, mask, seed)`` of heads that share keys in pairs."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, seed: Tensor) -> Any:
        k, v = (x.expand(B, A, *x.shape[2:]) for x in (k, v))
        result = self.attend(q @ k.transpose(-2, -1) * 0.5, v, mask, seed)
        return result if isinstance(result, tuple) else (result,)


def dropped(scores: Tensor, seed: Tensor) -> Tensor:
    return _sp.dropout(scores.softmax(-1), seed, 0.25, 3, 1, 1)  # type: ignore[no-any-return]


def forbidden(scores: Tensor, v: Tensor, mask: Tensor, seed: Tensor) -> Tensor:
    """A mask of booleans, whose first sample forbids all of a row."""
    seen = mask > -1
    probabilities = scores.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0)
    return _sp.dropout(probabilities, seed, 0.25, 3, 1, 1) @ v  # type: ignore[no-any-return]


def causal(scores: Tensor, v: Tensor, mask: Tensor, seed: Tensor) -> Tensor:
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return dropped(scores.masked_fill(~seen, -torch.inf), seed) @ v


def stored(scores: Tensor, v: Tensor, mask: Tensor, seed: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    kept = _sp.dropout_mask(probabilities, seed, 0.25, 3, 1, 1)
    return torch.ops.aten.native_dropout_backward(probabilities, kept, 4 / 3) @ v


ATTENTION: dict[str, Attend] = {
    "causal": causal,
    "booleans": forbidden,
    # Its gradient, of a bias for all samples, is a sum of all scores but those over the queries.
    "added": lambda scores, v, mask, seed: dropped(scores + mask[:1], seed) @ v,
    "stored masks": stored,
    "half batch": lambda scores, v, mask, seed: (
        _sp.dropout(scores.softmax(-1), seed, 0.25, 3, 1, 1, 40, 0) @ v
    ),
}


def attention_joint(attend: Attend, queries: int = S) -> JointGraph:
    shapes = (B, A, queries, D), (B, 1, queries, D), (B, 1, queries, D), (B, 1, queries, queries)
    given = [*(torch.zeros(shape).double() for shape in shapes), torch.tensor(5)]
    kinds: list[RefKind] = ["call", "call", "call", "call", "seed"]
    region = region_of(Attention(attend), *given, kinds=kinds, requires_grad=[True] * 4 + [False])
    joint = trace_joint(region)
    simplify(joint.graph)
    return joint


def run_attention(joint: JointGraph) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, A, S, D), (B, 1, S, D), (B, 1, S, D), (B, 1, S, S), (B, A, S, D)
    q, k, v, mask, tangent = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    mask[0, 0, 2] = -2
    with running_on(Communicator(None, 0, 1)):
        return fx.GraphModule({}, joint.graph)(q, k, v, mask, torch.tensor(5), tangent)


def in_chunks(joint: JointGraph, count: int) -> tuple[JointGraph, PassReport]:
    before = render(joint.graph)
    with reporting(PassReport(Pass.CHUNK)) as report:
        (result,) = chunk(joint, 1, (1,), (count,))
    assert render(joint.graph) == before
    result.graph.lint()
    return result, report


def test_the_graph_has_a_copy_of_attention_for_each_chunk() -> None:
    result, report = in_chunks(attention_joint(causal), 2)
    text = render(result.graph)
    check_golden("chunk/attention.txt", text)
    assert report.kinds == {"attention in 2 chunks": 1}
    assert render(in_chunks(result, 2)[0].graph) == text


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("name", ATTENTION)
def test_chunks_of_queries_give_the_same_numbers(name: str, count: int) -> None:
    joint = attention_joint(ATTENTION[name])
    result, report = in_chunks(joint, count)
    assert report.kinds == {f"attention in {count} chunks": 1}, report.declined
    # A mask for each sample remains, and the gradient of an added one, without a dim of heads.
    shapes = [_rows(n) for n in result.graph.nodes if n.op == "call_function"]
    pairs = [x for x in shapes if x[-2:] == (S, S) and torch.Size(x).numel() > B * S * S]
    assert not pairs, "scores of all queries"
    for got, expected in zip(run_attention(result), run_attention(joint), strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-15, atol=1e-15)


def test_masks_of_chunks_are_those_of_the_whole() -> None:
    """Without first query, the chunks would draw alike, and the comparison above would fail."""
    joint = attention_joint(causal)
    result, _ = in_chunks(joint, 2)
    for node in result.graph.find_nodes(op="call_function", target=_sp.dropout.default):
        node.args = (*node.args[:8], 0, 0)
    expected, got = (run_attention(each)[0] for each in (joint, result))
    assert not torch.allclose(got, expected)


NO_ATTENTION: dict[str, tuple[Attend, list[str]]] = {
    "no dropout": (lambda scores, v, mask, seed: scores.softmax(-1) @ v, []),
    "no softmax": (
        lambda scores, v, mask, seed: _sp.dropout(scores.relu(), seed, 0.25, 3, 1, 1) @ v,
        [],
    ),
    "queries sharded over ranks": (
        lambda scores, v, mask, seed: _sp.dropout(scores.softmax(-1), seed, 0.25, 3, 2, 2) @ v,
        [MIXED],
    ),
    "softmax over queries": (
        lambda scores, v, mask, seed: _sp.dropout(scores.softmax(-2), seed, 0.25, 3, 1, 1) @ v,
        [MIXED],
    ),
    "probabilities returned": (
        lambda scores, v, mask, seed: (dropped(scores, seed) @ v, scores.softmax(-1)),
        [RETURNED],
    ),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_no_attention_with_dropout_stays(name: str) -> None:
    attend, reasons = NO_ATTENTION[name]
    joint = attention_joint(attend)
    result, report = in_chunks(joint, 2)
    assert render(result.graph) == render(joint.graph)
    assert [each.reason for each in report.declined] == reasons


def test_short_attention_is_not_cut_unless_asked() -> None:
    for queries, ways in ((2 * LEAST_QUERIES - 1, 1), (2 * LEAST_QUERIES, 2)):
        assert len(chunk(attention_joint(causal, queries), 1, None, None)) == ways
