"""Measurements of the benchmarks: saved bytes, collectives, ratios."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import StepReport, alternate, observe_step, ratio
from benchmarks.models import Block, GPTConfig, PlainGPT
from benchmarks.peers import dtensor
from benchmarks.peers.megatron_style import MegatronStyleGPT
from sp_compiler.runtime.recorder import Recorder
from tests.helpers.ranks import run_on_ranks


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sin().view(-1).sum()


def test_kept_bytes_count_each_storage_once_and_leave_inputs_and_outputs_out() -> None:
    x = torch.randn(10, dtype=torch.float64, requires_grad=True)
    report = observe_step(_Chain(), [x], lambda: _Chain()(x))
    # exp keeps its result, which sin keeps as its input; nothing keeps sin's result.
    assert report == StepReport(kept_bytes=80, forward={}, backward={}, wire_bytes={})
    assert x.grad is not None


def test_nothing_is_kept_without_gradients() -> None:
    x = torch.randn(10)
    with torch.no_grad(), Recorder() as recorder:
        y = _Chain()(x)
    assert recorder.alive_bytes(excluding=[x, y]) == 0


def test_an_eager_block_keeps_what_the_paper_counts() -> None:
    """The paper's 34sbh + 5as²b in bf16, here without dropouts: 30sbh + 2as²b.

    Without dropout the masks (2sbh + as²b) and the probabilities after dropout (2as²b) are gone,
    and so is the copy of the softmax's output; the row statistics of two norms come on top.
    """
    config = GPTConfig(
        hidden_size=64, num_heads=4, num_positions=16, dropout=0.0, attention_dropout=0.0
    )
    block = Block(config).bfloat16()
    s, b, h, a = 16, 3, 64, 4
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    report = observe_step(block, [x], lambda: block(x).float().sum())
    statistics = 2 * 2 * s * b * 2
    scores, rest = report.kept_bytes - 30 * s * b * h - statistics, 2 * a * s * s * b
    assert scores == rest


def _peers() -> list[StepReport]:
    group = dist.group.WORLD
    assert group is not None
    config = GPTConfig(
        vocab_size=32,
        num_positions=8,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        dropout=0.0,
        attention_dropout=0.0,
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    style = MegatronStyleGPT(PlainGPT(config), group)
    other = dtensor.parallelize(PlainGPT(GPTConfig(**{**vars(config), "fused_qkv": False})), group)

    def forward() -> Any:
        return other(ids, labels=ids)

    with dtensor.loss_parallel():
        return [
            observe_step(style, [ids], lambda: style(ids, ids)),
            observe_step(other, [ids], forward),
        ]


@pytest.mark.slow
def test_collectives_of_the_peers_are_counted() -> None:
    for style, other in run_on_ranks(2, _peers):
        layers = 2
        # Two pairs a layer, one gather at the head, one scatter at the embedding.
        assert style.forward["all-gather"] == 2 * layers + 1
        assert style.forward["reduce-scatter"] == 2 * layers + 1
        assert style.forward["all-reduce"] == 3
        assert style.backward["reduce-scatter"] == 2 * layers + 1
        assert style.backward["all-gather"] == 4 * layers + 2
        assert other.forward["all-gather"] == 2 * layers + 1
        assert other.forward["reduce-scatter"] == 2 * layers + 1
        # Megatron keeps shards and gathers again; DTensor keeps the gathered inputs.
        assert other.backward["all-gather"] < style.backward["all-gather"]
        assert other.kept_bytes > style.kept_bytes


def test_ratio_compares_within_rounds() -> None:
    times = {"a": [1.0, 10.0, 3.0], "b": [2.0, 20.0, 6.0]}
    assert ratio(times, "a", "b") == pytest.approx(0.5)


def test_every_round_runs_all_in_an_order_of_its_own() -> None:
    def run() -> tuple[list[str], dict[str, list[float]]]:
        calls: list[str] = []
        steps = {name: lambda name=name: calls.append(name) for name in "abc"}
        return calls, alternate(steps, rounds=7, warmup=1)

    calls, times = run()
    rounds = [tuple(calls[at : at + 3]) for at in range(0, 24, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) > 2
    assert run()[0] == calls  # as on every other rank
    assert [len(values) for values in times.values()] == [7, 7, 7]
