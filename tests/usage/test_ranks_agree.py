"""Ranks that disagree, hooks and buffers on two gloo ranks, through the public API."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import sp_compiler
from sp_compiler import ArgumentError, RankMismatchError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.two_ranks import (
    assert_same_gradients,
    compiled,
    eager,
    full,
    result,
    run_checks,
)
from tests.helpers.users import batch, net
from tests.models import zoo

pytestmark = pytest.mark.slow


# Checks that run on both ranks of one group; each raises where it fails.


def _mismatches() -> Any:
    """Ranks with different inputs raise on every rank, and go on afterwards."""
    rank = dist.get_rank()
    module = sp_compiler.compile(net(), tp=2)
    module(batch(4))
    with pytest.raises(RankMismatchError, match="same inputs") as caught:
        module(batch(4 + 2 * rank))
    assert "(4, 8)" in str(caught.value)
    assert "(6, 8)" in str(caught.value)
    module(batch(6))
    with pytest.raises(RankMismatchError, match="same inputs"):  # both shapes are compiled
        module(batch(4 + 2 * rank))
    with pytest.raises(RankMismatchError, match="same inputs"):
        module.train(rank == 0)(batch(4))
    module.train()(batch(4))["loss"].backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SP_COMPILER_CHECK", "1")
        module(batch(4))
        with pytest.raises(RankMismatchError, match=r"input .* differs"):
            module(batch(4) + rank)
        model = net()
        nn.init.constant_(model.head.weight, rank)
        unequal = sp_compiler.compile(model, tp=2)
        with pytest.raises(RankMismatchError, match=r"head\.weight"):
            unequal(batch(4))
    return None


def _options() -> Any:
    """Ranks that compile with other options raise on every rank, before any parameter is placed."""
    rank = dist.get_rank()
    for name, first, second in (
        ("recompute", "selective", "full"),
        ("sequence_parallel", True, False),
        ("dropout", "regenerate", "stored"),
        ("overlap", True, False),
        ("outputs", "auto", "replicate"),
        ("nominal_tokens", 8192, 64),
        ("hints", {"head": Replicate()}, {"blocks.*.up": Shard(0), "head": Replicate()}),
        ("memory_budget", "1GiB", "2GiB"),
    ):
        options: dict[str, Any] = {name: (first, second)[rank]}
        if name == "memory_budget":
            options["recompute"] = "auto"
        module = sp_compiler.compile(net(), tp=2, **options)
        with pytest.raises(RankMismatchError, match="weights and options") as caught:
            module(batch(4))
        lines = str(caught.value).splitlines()[1:]
        named = [line.rpartition(f": {name}: ")[0] for line in lines]
        assert named == ["  rank 0", "  rank 1"]
        assert all(
            parameter.to_local().shape == parameter.shape for parameter in module.parameters()
        )
        with pytest.raises(RankMismatchError, match=f"rank 1: {name}: "):
            sp_compiler.compile(net(), tp=2, example_inputs=((batch(4),), {}), **options)
        # As on accelerators, where ranks agree through the store, and only to compile.
        module._sp_state.agreement.every_call = False
        with pytest.raises(RankMismatchError, match=f"rank 1: {name}: "):
            module(batch(4))
    hints: list[tuple[str, Any]] = [("head", Replicate()), ("blocks.*.up", Shard(0))]
    same = sp_compiler.compile(net(), tp=2, hints=dict(hints if rank else hints[::-1]))
    same(batch(4))["loss"].backward()
    options = {"tp": 2, "recompute": ("none", "full")[rank]}
    torch._dynamo.reset()
    function = torch.compile(net(), backend="sp_compiler", options=options)
    with pytest.raises(RankMismatchError, match="rank 1: recompute: 'full'"):
        function(batch(4))
    return None


def _errors() -> Any:
    with pytest.raises(ArgumentError, match="has 2 ranks"):
        sp_compiler.compile(net(), tp=4)
    module = sp_compiler.compile(net(), tp=2)
    with pytest.raises(ArgumentError, match=r"x has shape \(0, 8\), with no elements"):
        module(batch(0))
    module(batch(4))
    assert isinstance(module.get_parameter("blocks.0.up.weight").placements[0], Shard)
    module(batch(0))["loss"].backward()
    assert module.get_parameter("blocks.0.up.weight").grad is not None
    _indices_out_of_range()
    model = net()
    model.head.weight.register_hook(lambda grad: grad)
    with pytest.raises(ArgumentError, match=r"after sp_compiler\.compile"):
        sp_compiler.compile(model, tp=2)
    return None


def _indices_out_of_range() -> None:
    """As on one device: a vocabulary's shards would take them for another rank's."""
    ids = zoo.inputs("gpt2")["input_ids"]
    module = compiled("gpt2")
    module(ids, labels=ids)
    for wrong in (ids + zoo.VOCAB, torch.full_like(ids, -1)):
        with pytest.raises(IndexError, match=rf"index .* for an embedding of {zoo.VOCAB} rows"):
            module(wrong, labels=ids)
        with pytest.raises(IndexError, match=rf"a loss over {zoo.VOCAB} classes"):
            module(ids, labels=wrong)
    ignored = torch.where(ids == ids[0, 0], -100, ids)
    actual, true = (one(ids, labels=ignored).loss for one in (module, eager("gpt2")))
    torch.testing.assert_close(full(actual), true, rtol=1e-6, atol=0)  # of logits in float32


def _hooks() -> Any:
    """The gradient that hooks of a replicated and of a sharded parameter see."""
    module, model = compiled(), eager()
    found = []
    for one in (module, model):
        seen: dict[str, Tensor] = {}
        for name, parameter in one.named_parameters():
            parameter.register_hook(lambda grad: 2 * grad)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, seen=seen: seen.update({name: full(p.grad)})
            )
        one(**zoo.inputs("plain")).loss.backward()
        found.append(seen)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert_same_gradients(module, model)
    return None


class Statistics(nn.Module):
    """Tracks a mean of its hidden activations, which two ranks hold in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)
        self.down = nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))  # type: ignore[operator]
            self.steps += 1
        return self.down(hidden).square().mean()


class Counting(nn.Module):
    """Counts its calls and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)  # type: ignore[operator]
        return self.linear(x - self.mean).square().mean()


def _buffers() -> Any:
    """Written back whole, also where the new value is computed in parts."""
    for kind in (Counting, Statistics):
        torch.manual_seed(0)
        model = kind().double()
        twin = copy.deepcopy(model)
        module = sp_compiler.compile(model, tp=2)
        for seed in range(3):
            for one in (module, twin):
                one(batch(6, seed=seed)).backward()
        torch.testing.assert_close(dict(module.named_buffers()), dict(twin.named_buffers()))
        assert_same_gradients(module, twin)
    return None


class Deciding(nn.Module):
    """Branches on a number in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).square()
        return y.mean() if x.max() > 10 else y.sum()


def _decisions() -> Any:
    """Ranks take the same path or raise, before and after both paths are compiled."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Deciding().double()
    twin = copy.deepcopy(model)
    module = sp_compiler.compile(model, tp=2)
    with pytest.raises(RankMismatchError, match="same inputs"):
        module(batch(4) + 20 * rank)
    for offset in (0, 20, 0):
        for one in (module, twin):
            one(batch(4) + offset).backward()
    assert_same_gradients(module, twin)
    for _ in range(20):  # past the calls of each kind whose values are compared
        module(batch(4))
        module(batch(4) + 20)
    with pytest.raises(RankMismatchError, match=r"x\.max") as caught:
        module(batch(4) + 20 * rank)
    assert "if x.max() > 10 else" in str(caught.value)
    torch.testing.assert_close(module(batch(4)), twin(batch(4)))
    return None


class Named(nn.Module):
    """Reads a text."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.linear(x)
        return y.mean() if name.endswith("0") else y.sum()


def _texts() -> Any:
    """Ranks compare a text whole, not only the part of it that messages show."""
    torch.manual_seed(0)
    module = sp_compiler.compile(Named().double(), tp=2)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=r"(?s)input name .* rank 1: name: 'x+1'"):
            module(batch(4), f"{'x' * 60}{dist.get_rank()}")
        module(batch(4), "0").backward()
    return None


def _code() -> Any:
    module = compiled("gpt2", example_inputs=((), zoo.inputs("gpt2")))
    shown = module.diff("capture", "final")
    assert any(entry.collective for entry in shown.entries)
    return module.code


CHECKS = (
    _buffers,
    _decisions,
    _errors,
    _hooks,
    _mismatches,
    _options,
    _texts,
)


def _all() -> dict[str, Any]:
    return run_checks((*CHECKS, _code), share=False)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, _all)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    assert result(ranks, name) == [None, None]


def test_ranks_run_the_same_text(ranks: list[dict[str, Any]]) -> None:
    first, second = result(ranks, "_code")
    assert first == second
