"""Frozen weights and low-rank adapters: no gradient, no work, nothing kept for what is frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.runtime.recorder import Recorder
from tests.helpers.users import (
    assert_same_gradients,
    batch,
    compiled,
    gradients,
    net,
    num_compiled,
    prepared,
)
from tests.models import zoo


class Frozen(nn.Module):
    """A frozen perceptron: a gradient flows through it, none to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16).requires_grad_(False)
        self.down = nn.Linear(16, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _region(module: Any, name: str) -> Any:
    return module._sp_state.latest.regions[name]


def test_requires_grad_may_change_between_calls() -> None:
    module, model = prepared(), net()
    for frozen in (["blocks.0.up.weight", "head.bias"], []):
        for one in (module, model):
            one.zero_grad()
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name not in frozen)
            one(batch())["loss"].backward()
        assert not set(frozen) & set(gradients(module))
        assert_same_gradients(module, model)
    assert num_compiled(module) == 2
    module.requires_grad_(False)
    assert not module(batch())["loss"].requires_grad


def test_an_optimizer_with_state_survives_freezing() -> None:
    module, model = prepared(), net()
    for one in (module, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            one.get_submodule("blocks.0").requires_grad_(step % 2 == 0)
            one(batch())["loss"].backward()
            optimizer.step()
    states = [dict(one.state_dict()) for one in (module, model)]
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)


def test_frozen_first_blocks_have_no_backward_at_all() -> None:
    module = prepared()
    everything = module.code
    module.blocks.requires_grad_(False)
    out = module(batch())
    out["loss"].backward()
    assert set(gradients(module)) == {"head.weight", "head.bias"}
    assert module.code.count("torch.mm(") < everything.count("torch.mm(")


@pytest.fixture(scope="module")
def lora() -> DistributedModule:
    module = sp_compiler.compile(zoo.build("lora"), tp=1)
    module(**zoo.inputs("lora"))
    return module


def test_adapters_have_the_gradients_of_eager(lora: DistributedModule) -> None:
    module, model = copy.deepcopy(lora), zoo.build("lora")
    for one in (module, model):
        zoo.loss_of(one(**zoo.inputs("lora"))).backward()
    assert all("down" in name or "up" in name for name in gradients(module))
    assert_same_gradients(module, model)


def test_frozen_weights_have_no_weight_gradient_gemm(lora: Any) -> None:
    """A block has 6 frozen linears, one of them without adapter twice, and 4 adapters of two.

    Backward of the last block: one matrix product for the gradient of each of the 14 inputs, and
    one for each of the 8 trained weights. The first block needs no gradient of its input, so 5
    fall away: query and value with the first halves of their adapters, and key.
    """
    first, last = (_region(lora, name).source.split("def backward") for name in _blocks(lora))
    assert last[0].count("F.linear(") == 14
    assert last[1].count("torch.mm(") == 14 + 8
    assert first[1].count("torch.mm(") == 14 + 8 - 5


def _blocks(lora: Any) -> list[str]:
    return list(dict.fromkeys(c.region.name for c in lora._sp_state.latest.program.calls if c.path))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_frozen_weights_keep_no_input(recompute: str) -> None:
    """Of the perceptron only what the activation function needs; of the head only the logits."""
    module = compiled(lambda: Frozen().double(), recompute=recompute)
    x = batch().requires_grad_()
    module(x)
    with Recorder() as recorder:
        y = module(x)
    kept = recorder.alive_bytes(excluding=[x, y, *module.parameters()])
    assert kept == 4 * 6 * 16 * 8
    y.sum().backward()
    assert not gradients(module)


def test_a_frozen_head_keeps_no_input(lora: Any) -> None:
    saved = _region(lora, "Epilogue").partitioned.saved
    assert [value.op for value in saved if value.is_activation] == ["linear"]


@pytest.mark.slow
def test_peft_trains_like_eager() -> None:
    found = []
    for one in (sp_compiler.compile(zoo.build("peft_gpt2"), tp=1), zoo.build("peft_gpt2")):
        trained = [p for p in one.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            one(**zoo.inputs("peft_gpt2")).loss.backward()
            optimizer.step()
        assert all(p.grad is None for p in one.parameters() if not p.requires_grad)
        found.append(dict(one.state_dict()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
