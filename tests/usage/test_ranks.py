"""Ordinary use on two and three gloo ranks, through the public API."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import sp_compiler
from sp_compiler import UnsupportedError
from sp_compiler.runtime.recorder import Recorder
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.two_ranks import (
    assert_same_gradients,
    compiled,
    eager,
    full,
    logits,
    result,
    run_checks,
    train,
)
from tests.helpers.users import gradients
from tests.models import zoo

pytestmark = pytest.mark.slow


# Checks that run on both ranks of one group; each raises where it fails.


def _training() -> Any:
    if dist.get_rank() == 0:  # a module of its own, in which the other rank has no part
        logits(compiled(tp=1), zoo.inputs("plain")["input_ids"])
    return train(compiled(dropout=0.1))


def _bitwise() -> Any:
    first, second = (train(compiled(dropout=0.1), 2) for _ in range(2))
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    return None


def _gradients_in_many_ways() -> Any:
    module, model = compiled("plain_logits"), eager("plain_logits")
    ids = zoo.inputs("plain_logits")["input_ids"]
    other = zoo.inputs("plain_logits", seed=3)["input_ids"]

    def fresh() -> None:
        module.zero_grad()
        model.zero_grad()

    for one in (module, model):  # several forwards before one backward
        torch.stack([logits(one, x).square().mean() for x in (ids, other)]).sum().backward()
    assert_same_gradients(module, model)
    fresh()
    for one in (module, model):  # a retained graph
        loss = logits(one, ids).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(module, model)
    fresh()
    for one in (module, model):  # an outer loss, of a part of the output
        nn.functional.cross_entropy(
            logits(one, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
    assert_same_gradients(module, model)
    fresh()
    names = [name for name, _ in model.named_parameters()]
    chosen = [names[0], names[3], names[-1]]
    found = [
        torch.autograd.grad(
            logits(one, ids).square().mean(), [one.get_parameter(n) for n in chosen]
        )
        for one in (module, model)
    ]
    for actual, true in zip(*found, strict=True):
        torch.testing.assert_close(full(actual), true, rtol=1e-9, atol=1e-12)
    assert not gradients(module)
    loss = logits(module, ids).square().mean()
    (grad,) = torch.autograd.grad(loss, [module.get_parameter(names[0])], create_graph=True)
    with pytest.raises(UnsupportedError, match="use the original model"):
        grad.to_local().sum().backward()
    for use_reentrant in (True, False):
        fresh()
        for one in (module, model):
            shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
            y = checkpoint(
                lambda s, one=one: logits(one, ids) + s, shift, use_reentrant=use_reentrant
            )
            y.square().mean().backward()
        assert_same_gradients(module, model)
    for shape in ((3, 5), (1, 1)):  # tokens that two ranks do not share evenly
        fresh()
        some = zoo.inputs("plain_logits", *shape)["input_ids"]
        for one in (module, model):
            logits(one, some).square().mean().backward()
        assert_same_gradients(module, model)
    return None


def _checkpoint_with_dropout() -> Any:
    module = compiled("plain_logits", dropout=0.2)
    ids = zoo.inputs("plain_logits")["input_ids"]
    found = []
    for outer in (False, True):
        module.zero_grad()
        torch.manual_seed(4)
        y = checkpoint(logits, module, ids, use_reentrant=False) if outer else logits(module, ids)
        torch.rand(1)
        y.square().mean().backward()
        found.append({name: full(grad) for name, grad in gradients(module).items()})
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)
    return None


def _gradients_of_inputs() -> Any:
    """Whole and equal on all ranks."""
    module, model = compiled("gpt2"), eager("gpt2")
    labels = zoo.inputs("gpt2")["labels"]
    values = torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for one in (module, model):
        embeds = values.clone().requires_grad_()
        one(inputs_embeds=embeds, labels=labels).loss.backward()
        found.append(embeds.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    return found[0]


def _outputs() -> Any:
    """Logits beside a loss stay sharded; alone, or when asked, they are whole."""
    inputs, model = zoo.inputs("gpt2"), eager("gpt2")
    true = model(**inputs)
    kinds = []
    for options in ({}, {"outputs": "replicate"}, {"outputs": "shard"}):
        module = compiled("gpt2", **options)
        out = module(**inputs)
        assert type(out) is type(true)
        kinds.append(type(out.logits).__name__)
        torch.testing.assert_close(full(out.logits), true.logits.detach(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(out.loss, true.loss, rtol=1e-6, atol=0)
        (out.loss + out.logits.square().mean()).backward()
        alone = module(inputs["input_ids"]).logits
        kinds.append(type(alone).__name__)
    return kinds


def _modes() -> Any:
    module, model = compiled(dropout=0.3), eager()
    inputs = zoo.inputs("plain")
    module.eval()
    actual, true = (zoo.loss_of(one(**inputs)) for one in (module, model))
    torch.testing.assert_close(actual, true, rtol=1e-10, atol=0)
    del actual  # torch exchanges DTensors for others of another type only while no graph holds them
    with torch.no_grad():
        with Recorder() as recorder:
            out = module(**inputs)
        kept = recorder.alive_bytes(
            excluding=[
                *inputs.values(),
                out.loss,
                out.logits,
                *module.parameters(),
                *module.buffers(),
            ]
        )
    assert kept == 0
    with torch.inference_mode():
        assert not module(**inputs).loss.requires_grad
    module.train()
    assert module(**inputs).loss.item() != module(**inputs).loss.item()
    module.float().eval()
    model.float()
    for one in (module, model):
        with torch.autocast("cpu", torch.bfloat16):
            one(**inputs).loss.backward()
    assert_same_gradients(module, model, 3e-2)
    return None


def _frozen() -> Any:
    module, model = compiled("lora"), eager("lora")
    inputs = zoo.inputs("lora")
    for one in (module, model):
        one(**inputs).backward()
    assert_same_gradients(module, model)
    for one in (module, model):  # adapters of the first projection too
        one.zero_grad()
        one.get_submodule("blocks.0.query.down").requires_grad_(False)
        one.get_submodule("blocks.0.mlp_norm").requires_grad_(True)
        one(**inputs).backward()
    assert_same_gradients(module, model)
    return None


def _in_place() -> Any:
    """Parameters changed in many ways before and after they are placed; copies are independent."""
    module, model = compiled("plain_logits"), eager("plain_logits")
    ids = zoo.inputs("plain_logits")["input_ids"]
    names = [name for name, p in model.named_parameters() if p.ndim == 2]

    def change() -> None:
        for one in (module, model):
            one.get_parameter(names[-1]).data.mul_(0.5)
            nn.init.constant_(one.get_parameter(names[2]), 0.01)
            with torch.no_grad():
                one.get_parameter(names[3]).add_(0.1)
        torch.testing.assert_close(logits(module, ids), logits(model, ids), rtol=1e-9, atol=1e-12)

    change()
    change()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not logits(twin, ids).any()
    torch.testing.assert_close(logits(module, ids), logits(model, ids), rtol=1e-9, atol=1e-12)
    return None


CHECKS = (
    _bitwise,
    _checkpoint_with_dropout,
    _frozen,
    _gradients_in_many_ways,
    _in_place,
    _modes,
)


def _all() -> dict[str, Any]:
    return run_checks((*CHECKS, _training, _gradients_of_inputs, _outputs))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_rehearsed(2, _all)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    assert result(ranks, name) == [None, None]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The same training on one rank."""
    return train(compiled(dropout=0.1, tp=1))


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-9, atol=0)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-9, atol=0)
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-8, atol=1e-10)


def test_two_ranks_train_like_one(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for found in result(ranks, "_training"):
        assert_same_training(found, expected)


def test_gradients_of_inputs_are_whole_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = result(ranks, "_gradients_of_inputs")
    assert torch.equal(first, second)


def test_outputs_are_sharded_beside_a_loss_only(ranks: list[dict[str, Any]]) -> None:
    kinds = ["ShardedOutput", "Tensor", "Tensor", "Tensor", "ShardedOutput", "ShardedOutput"]
    assert result(ranks, "_outputs") == [kinds, kinds]


def _three() -> dict[str, Any]:
    """Three ranks, which divide neither 4 heads, nor 32 columns, nor 128 words."""
    warnings.simplefilter("ignore")
    module = compiled(dropout=0.1)
    return {"training": train(module), "fallbacks": list(module.plan.fallbacks)}


def test_ranks_that_fit_nothing_in_the_model(expected: dict[str, Any]) -> None:
    for found in run_rehearsed(3, _three):
        assert_same_training(found["training"], expected)
        assert not found["fallbacks"]  # heads, columns and words are padded


SCRIPT = """
import torch, torch.distributed as dist
import sp_compiler
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
module = sp_compiler.compile(model, tp=dist.get_world_size())
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
x, losses = torch.ones(4, 8), []
for _ in range(3):
    loss = module(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[0]
print(f"rank {dist.get_rank()} of {dist.get_world_size()} done\\n", end="", flush=True)
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = Path(sp_compiler.__file__).parents[1]
    found = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.stdout.count("of 2 done") == 2, found.stderr
