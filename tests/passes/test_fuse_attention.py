"""Attention as one operator: what is found in the graph of a region, and what is not."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.compiler import to_program
from sp_compiler.options import CompileOptions
from sp_compiler.passes import fuse_attention as module
from sp_compiler.passes.fuse_attention import fuse_attention
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.trace.export import capture
from tests.helpers import parity
from tests.helpers.graph_builder import text
from tests.helpers.slow import slow

HEADS, WIDTH, LENGTH = 4, 16, 128
HIDDEN = HEADS * WIDTH


class Attention(nn.Module):
    """Self-attention of (b, s, h), whose core is the method that a test overrides."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("mask", torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        factors = [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]
        return self.out(self.core(*factors).transpose(1, 2).flatten(-2))

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT / math.sqrt(WIDTH)
        scores = scores.masked_fill(~self.mask, -math.inf)
        return F.dropout(scores.softmax(-1), 0.1, self.training) @ value


class Fused(Attention):
    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, self.mask, dropout_p=0.1 if self.training else 0.0
        )


class Flat(Attention):
    """Samples and heads in one dim, as Megatron has them, and scores in 32 bits."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        nothing = torch.zeros(query.shape[0] * HEADS, LENGTH, LENGTH)
        scores = torch.baddbmm(nothing, flat[0], flat[1].mT, beta=0.0, alpha=0.25)
        probs = scores.unflatten(0, (-1, HEADS)).float().softmax(-1).type_as(query)
        probs = F.dropout(probs, 0.1, self.training)
        return torch.bmm(probs.flatten(0, 1), flat[2]).unflatten(0, (-1, HEADS))


class OfSamples(Attention):
    """A mask per sample, in one dim with the heads."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        mask = self.mask[0].repeat(query.shape[0] * HEADS, 1, 1)
        scores = torch.bmm(flat[0], flat[1].mT).masked_fill(~mask, -math.inf)
        return torch.bmm(scores.softmax(-1), flat[2]).unflatten(0, (-1, HEADS))


class Plain(Attention):
    """A mask per head, and no dropout."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distance = torch.arange(LENGTH).view(-1, 1) - torch.arange(LENGTH)
        near = distance.abs() < torch.arange(1, HEADS + 1).view(-1, 1, 1)
        return (query @ key.mT * 0.25).masked_fill(~near, -math.inf).softmax(-1) @ value


class Single(Attention):
    """A head in no dim of its own: what is (b, s, h) is broadcast like tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.core(*self.qkv(x).chunk(3, -1)))

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, self.mask[0, 0], dropout_p=0.1 if self.training else 0.0
        )


FOUND = [Attention, Fused, Flat, OfSamples, Plain, Single]


def _fused(model: nn.Module, tp: int = 2, length: int = LENGTH) -> tuple[str, PassReport]:
    """The graph of a rank after the pass, as text, and the report of the pass."""
    options = CompileOptions(tp=tp)
    captured = capture(model, (torch.randn(2, length, HIDDEN),), {})
    program = shard(to_program(captured, options), options, {}, ()).program
    report = PassReport(Pass.FUSE_ATTENTION)
    with reporting(report):
        graphs = [fuse_attention(each).module.graph for each in program.regions]
    return "\n".join(line for graph in graphs for line in text(graph)), report


def test_graph_of_a_rank() -> None:
    lines, report = _fused(Attention())
    expected = """
        transpose_3 = transpose(permute)
        logical_not = logical_not(bitwise_not)
        dropout_attention = dropout_attention(\
transpose, transpose_3, transpose_1, logical_not, seed)
        getitem_3 = getitem(dropout_attention)
        transpose_2 = transpose(getitem_3)
    """
    assert textwrap.dedent(expected).strip() in lines
    assert "softmax" not in lines
    assert report.kinds["dropout_attention"] == 1


@pytest.mark.parametrize("model", FOUND)
@pytest.mark.parametrize("training", [True, False])
def test_found(model: type[Attention], training: bool) -> None:
    lines, report = _fused(model().train(training))
    assert not report.declined
    # In evaluation PyTorch's own operator is left, which has no dropout, and stays.
    fused = model not in (Fused, Single) or training
    assert ("dropout_attention" in lines) is fused
    assert "softmax" not in lines


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        (Attention, 2),
        (Plain, 3),
        # In turn: on how many ranks is another question than how it is written.
        *map(slow, FOUND, (1, 2, 3, 2, 1, 2)),
        *(slow(model, 3) for model in (Fused, OfSamples)),
    ],
)
def test_numbers(model: type[Attention], tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where operators compute what a kernel would; three ranks pad heads."""
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(module, "_DTYPES", (torch.float32, torch.float64))
    inputs: Any = ((torch.randn(2, LENGTH, HIDDEN),), {})
    plan = sp_compiler.plan(model(), inputs, tp=tp)
    assert "dropout_attention" in str(plan)
    assert sp_compiler.verify(model(), inputs, tp=tp).ok


def _shared_probabilities(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    probs = (query @ key.mT).softmax(-1)
    return probs @ value + probs.sum()


def _turned_behind_a_mask(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).masked_fill(~self.mask, -math.inf).mul(-0.5).softmax(-1) @ value


def _biased(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT + self.mask.logical_not() * -1e9).softmax(-1) @ value


def _biased_product(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    probs = torch.baddbmm(self.mask[0].float(), flat[0], flat[1].mT).softmax(-1)
    return torch.bmm(probs, flat[2]).unflatten(0, (-1, HEADS))


def _latents(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query[:1] @ key[:, :1].mT).softmax(-1) @ value


def _one_query(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = key[:, 0] @ self.out.bias[:WIDTH]  # (b, l), of one dim each
    return weights.softmax(-1).view(-1, 1, 1, LENGTH) @ value


def _mask_of_other_dims(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    of_samples = self.mask.repeat(query.shape[0], 1, 1, 1)
    scores = (query @ key.mT).masked_fill(~of_samples, -math.inf).transpose(0, 1)
    probs = scores.reshape(query.shape[0], HEADS, LENGTH, LENGTH).softmax(-1)
    return probs @ value


def _finite_mask(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).masked_fill(~self.mask, -1e9).softmax(-1) @ value


def _two_masks(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.mT).masked_fill(~self.mask, -math.inf)
    return scores.masked_fill(self.mask.mT.logical_not(), -math.inf).softmax(-1) @ value


def _capped(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).tanh().softmax(-1) @ value


def _over_queries(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-2) @ value


def _two_dropouts(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.dropout(F.dropout((query @ key.mT).softmax(-1), 0.1), 0.1) @ value


def _narrow(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query[..., :8] @ key[..., :8].mT).softmax(-1) @ value


def _zeroed(self: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.where(self.mask, (query @ key.mT).softmax(-1), 0.0) @ value


@pytest.mark.parametrize(
    ("core", "reason"),
    [
        (_shared_probabilities, "has other users"),
        (_turned_behind_a_mask, "multiplied by a negative number"),
        (_biased, "add changes its scores"),
        (_biased_product, "a bias is added to its scores"),
        (_latents, "its scores have other dims than"),
        (_finite_mask, "its mask makes scores -1000000000.0, not -inf"),
        (_two_masks, "more than one mask"),
        (_capped, "tanh changes its scores"),
        (_over_queries, "its softmax is not over the last dim"),
        (_two_dropouts, "its dropout is one of several"),
        (_narrow, "no kernel for heads of 8 and 16 columns"),
        (_zeroed, "its probabilities are changed after the softmax"),
    ],
)
def test_not_found(core: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "core", core)
    lines, report = _fused(Attention())
    assert "dropout_attention" not in lines
    (declined,) = report.declined
    assert reason in declined.reason


def test_short_sequences_stay() -> None:
    class Short(Attention):
        def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return (query @ key.mT).softmax(-1) @ value

    lines, report = _fused(Short(), length=LENGTH - 1)
    assert "dropout_attention" not in lines
    assert report.declined[0].reason == "fewer than 128 queries or keys"


def test_float64_has_no_kernel() -> None:
    options = CompileOptions(tp=1)
    captured = capture(Attention().double(), (torch.randn(2, LENGTH, HIDDEN).double(),), {})
    program = shard(to_program(captured, options), options, {}, ()).program
    report = PassReport(Pass.FUSE_ATTENTION)
    with reporting(report):
        fuse_attention(program.regions[0])
    assert report.declined[0].reason == "no kernel for torch.float64"


def test_the_pass_runs_on_a_gpu_alone() -> None:
    plan = sp_compiler.plan(Attention(), ((torch.randn(2, LENGTH, HIDDEN),), {}), tp=2)
    assert "dropout_attention" not in str(plan)


@pytest.mark.parametrize("core", [_one_query, _mask_of_other_dims])
def test_other_dims_stay(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "core", core)
    lines, _ = _fused(Attention(), tp=1)
    assert "dropout_attention" not in lines


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("plain", {"tp": 2}, marks=pytest.mark.slow),
        ("gpt2", {"tp": 3, "recompute": "none"}),  # which pads heads
        ("plain", {"tp": 2, "half_batches": True, "recompute": "full"}),
        pytest.param("bert", {"tp": 2, "sequence_parallel": False}, marks=pytest.mark.slow),
    ],
)
def test_dropout_is_that_of_one_device(
    name: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``verify`` drops nothing: here the masks are those of a seed, fused and not."""
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(module, "_DTYPES", (torch.float64,))
    monkeypatch.setattr(module, "_LEAST_ROWS", 2)
    monkeypatch.setattr(module, "_WIDTHS", range(1, 99))
    found = parity.case(name, 2, 12, p=0.1)
    program = parity.assert_parity(found, **options)
    assert "tp.dropout_attention(" in program.code
    assert "tp.dropout_attention_backward(" in program.code
