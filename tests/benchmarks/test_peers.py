"""The peers of the benchmarks compute what the plain GPT computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import GPTConfig, PlainGPT
from benchmarks.peers import dtensor
from benchmarks.peers.megatron_style import MegatronStyleGPT
from tests.helpers.ranks import run_on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "num_positions": 16,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
}


def _model(**options: Any) -> PlainGPT:
    torch.manual_seed(0)
    config = GPTConfig(**SIZES, **{"dropout": 0.0, "attention_dropout": 0.0, **options})
    model = PlainGPT(config).double()
    for parameter in model.parameters():  # biases and norms start at values that hide mistakes
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def _ids() -> Tensor:
    return torch.randint(
        0, SIZES["vocab_size"], (3, 12), generator=torch.Generator().manual_seed(1)
    )


def _eager(model: PlainGPT) -> dict[str, Tensor]:
    loss = model(_ids(), labels=_ids())[0]
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _megatron(settings: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    results = []
    for setting in settings:
        model = MegatronStyleGPT(_model(), group, **setting)
        loss = model(_ids(), _ids())
        loss.backward()
        model.finish_gradients()
        results.append({"loss": loss.detach(), **model.whole_gradients()})
    return results


def _dtensor(settings: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    results = []
    for setting in settings:
        model = dtensor.parallelize(_model(fused_qkv=False), group, **setting)
        loss = dtensor.train_step(model, _ids(), _ids())
        results.append({"loss": loss, **dtensor.whole_gradients(model)})
    return results


def _dropout_losses() -> list[tuple[float, float]]:
    """Losses of runs from one seed, by (attention, sequence parallel, recompute)."""
    group = dist.group.WORLD
    assert group is not None
    losses = []
    for setting in MEGATRON_SETTINGS:
        model = MegatronStyleGPT(_model(dropout=0.2, attention_dropout=0.2), group, **setting)
        torch.manual_seed(3)
        loss = model(_ids(), _ids())
        loss.backward()
        model.finish_gradients()
        norm = sum(float(grad.square().sum()) for grad in model.whole_gradients().values())
        losses.append((float(loss), norm))
    return losses


def _assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-13, msg=name)


SETTINGS: list[dict[str, Any]] = [
    {"sequence_parallel": sequence_parallel, "recompute": recompute}
    for sequence_parallel in (False, True)
    for recompute in ("none", "attention", "full")
]
MEGATRON_SETTINGS = [
    {**setting, "fused_attention": fused} for fused in (False, True) for setting in SETTINGS
]


@pytest.mark.slow
def test_megatron_style_equals_the_plain_model() -> None:
    """With attention written out, and by PyTorch's kernels."""
    expected = _eager(_model())
    for rank in run_on_ranks(2, _megatron, MEGATRON_SETTINGS):
        for result in rank:
            _assert_close(result, expected)


def test_dtensor_equals_the_plain_model() -> None:
    expected = _eager(_model(fused_qkv=False))
    for rank in run_on_ranks(2, _dtensor, SETTINGS):
        for result in rank:
            _assert_close(result, expected)


def test_recompute_redraws_the_same_dropout_masks() -> None:
    for losses in run_on_ranks(2, _dropout_losses):
        for first in (0, 3, 6, 9):
            assert losses[first] == pytest.approx(losses[first + 1], rel=1e-12)
            assert losses[first] == pytest.approx(losses[first + 2], rel=1e-12)
        assert losses[0] != losses[3]
