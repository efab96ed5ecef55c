"""Ordinary use on two and three gloo ranks, through the public API."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import sp_compiler
from benchmarks.measure import Recorder
from sp_compiler import ArgumentError, RankMismatchError, UnsupportedError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import batch, gradients, net
from tests.models import zoo

pytestmark = pytest.mark.slow


def full(value: Any) -> Tensor:
    """The whole of a tensor, a copy."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def compiled(name: str = "plain", **options: Any) -> Any:
    """A zoo model of one layer in float64, compiled for all ranks."""
    fields = {key: options.pop(key) for key in ("dropout", "dtype") if key in options}
    model = zoo.build(name, layers=1, **fields)
    tp = options.pop("tp", None) or dist.get_world_size()
    return sp_compiler.compile(model, tp=tp, **options)


def eager(name: str = "plain", **fields: Any) -> Any:
    return zoo.build(name, layers=1, **fields)


def logits(one: Any, ids: Tensor) -> Tensor:
    """What the plain model returns without labels."""
    output = one(ids)
    return output if isinstance(output, Tensor) else output[0]


def assert_same_gradients(module: nn.Module, model: nn.Module, rtol: float = 1e-9) -> None:
    mine = {name: full(grad) for name, grad in gradients(module).items()}
    torch.testing.assert_close(mine, gradients(model), rtol=rtol, atol=rtol)


def train(module: Any, steps: int = 3) -> dict[str, Any]:
    """Steps with dropout, accumulation, clipping and a schedule; made before the first call."""
    torch.manual_seed(9)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=steps)
    losses, norms = [], []
    for step in range(steps):
        with module.no_sync():
            zoo.loss_of(module(**zoo.inputs("plain", seed=2 * step))).backward()
        loss = zoo.loss_of(module(**zoo.inputs("plain", seed=2 * step + 1)))
        loss.backward()
        norms.append(full(nn.utils.clip_grad_norm_(module.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    state = {name: full(value) for name, value in module.state_dict().items()}
    return {"losses": losses, "norms": norms, "state": state}


# Checks that run on both ranks of one group; each raises where it fails.


def _training() -> Any:
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
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(full(mine), true, rtol=1e-9, atol=1e-12)
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
    mine, true = (zoo.loss_of(one(**inputs)) for one in (module, model))
    torch.testing.assert_close(mine, true, rtol=1e-10, atol=0)
    del mine  # torch exchanges DTensors for others of another type only while no graph holds them
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


def _state() -> Any:
    """Into files, into the original, and back."""
    module = compiled("gpt2")
    inputs = zoo.inputs("gpt2")
    loss = module(**inputs).loss.item()
    whole = {name: full(value) for name, value in module.state_dict().items()}
    model = eager("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(whole)
    assert model(**inputs).loss.item() == pytest.approx(loss, rel=1e-6)
    other = compiled("gpt2", example_inputs=((), inputs))
    other.load_state_dict({name: torch.zeros_like(value) for name, value in whole.items()})
    with tempfile.TemporaryDirectory() as folder:
        torch.save(module.state_dict(), Path(folder, "state.pt"))
        other.load_state_dict(torch.load(Path(folder, "state.pt"), weights_only=False))
    assert other(**inputs).loss.item() == loss
    return None


def _optimizers() -> Any:
    """Those that the README calls exact: as on one device."""
    kinds: dict[str, Any] = {
        "SGD": {"momentum": 0.9, "nesterov": True},
        "AdamW": {"amsgrad": True},
        "NAdam": {},
        "RAdam": {},
        "Adamax": {},
        "Adagrad": {},
        "Adadelta": {},
        "RMSprop": {"momentum": 0.5, "centered": True},
        "ASGD": {},
        "LBFGS": {},
        "Muon": {},  # of matrices only
    }
    ready = sp_compiler.compile(net(), tp=2, example_inputs=((batch(4),), {}))
    for name, options in kinds.items():
        pair = (copy.deepcopy(ready), net())
        for one in pair:
            chosen = [p for p in one.parameters() if name != "Muon" or p.ndim == 2]
            optimizer = getattr(torch.optim, name)(chosen, lr=0.1, **options)

            def closure(one: Any = one, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = one(batch(4))["loss"]
                loss.backward()
                return loss

            with pytest.MonkeyPatch.context() as patch:
                # It rounds to bfloat16 on the way, each rank its own part of a sum.
                patch.setattr(Tensor, "bfloat16", Tensor.clone)
                for _ in range(3):
                    optimizer.step(closure)
        states = [{key: full(value) for key, value in one.state_dict().items()} for one in pair]
        torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11, msg=name)
    return None


def _distributed_checkpoint() -> Any:
    """Fused, tied and replicated weights: training goes on as if never interrupted."""
    inputs = zoo.inputs("gpt2")

    def fresh(scale: float) -> Any:
        module = compiled("gpt2", example_inputs=((), inputs))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(scale)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)

    def step(module: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        optimizer.zero_grad()
        module(**inputs).loss.backward()
        optimizer.step()
        return {name: full(value) for name, value in module.state_dict().items()}

    module, optimizer = fresh(1.0)
    step(module, optimizer)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    other, resumed = fresh(0.0)
    model_state, optimizer_state = get_state_dict(other, resumed)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    set_state_dict(other, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert other.lm_head.weight is other.transformer.wte.weight
    torch.testing.assert_close(step(other, resumed), step(module, optimizer), rtol=0, atol=0)
    return None


def _pretrained() -> Any:
    """Every rank reads its part only, and never holds a whole matrix."""
    model = zoo.build("gpt2", layers=1, dtype=torch.float32)
    inputs = zoo.inputs("gpt2")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0], max_shard_size="30KB")  # type: ignore[operator]
    dist.barrier()
    with torch.device("meta"):
        empty = zoo.build("gpt2", layers=1, dtype=torch.float32)
    module = sp_compiler.compile(empty, tp=2, example_inputs=((), inputs))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert module.load_pretrained(folder[0]) == []
    fused = module.get_parameter("transformer.h.0.attn.c_attn.weight")
    assert tuple(fused.to_local().shape) == (32, 48)
    held = sum(p.to_local().untyped_storage().nbytes() for p in module.parameters())
    assert held < 0.7 * sum(p.nbytes for p in model.parameters())
    module(**inputs).loss.backward()
    model(**inputs).loss.backward()
    assert_same_gradients(module, model, 1e-4)
    optimizer.step()
    early = compiled("gpt2", dtype=torch.float32)
    early.load_pretrained(folder[0])
    torch.testing.assert_close(early(**inputs).loss, model(**inputs).loss)
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
        with pytest.raises(RankMismatchError, match="same options") as caught:
            module(batch(4))
        lines = str(caught.value).splitlines()[1:]
        assert [line.partition("=")[0] for line in lines] == [f"  rank {r}: {name}" for r in (0, 1)]
        assert all(
            parameter.to_local().shape == parameter.shape for parameter in module.parameters()
        )
        with pytest.raises(RankMismatchError, match=f"rank 1: {name}="):
            sp_compiler.compile(net(), tp=2, example_inputs=((batch(4),), {}), **options)
        # As on accelerators, where ranks agree through the store, and only to compile.
        module._sp_state.agreement.every_call = False
        with pytest.raises(RankMismatchError, match=f"rank 1: {name}="):
            module(batch(4))
    hints: list[tuple[str, Any]] = [("head", Replicate()), ("blocks.*.up", Shard(0))]
    same = sp_compiler.compile(net(), tp=2, hints=dict(hints if rank else hints[::-1]))
    same(batch(4))["loss"].backward()
    options = {"tp": 2, "recompute": ("none", "full")[rank]}
    torch._dynamo.reset()
    function = torch.compile(net(), backend="sp_compiler", options=options)
    with pytest.raises(RankMismatchError, match="rank 1: recompute='full'"):
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
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(ArgumentError, match="AdamW has state"):
        module(**zoo.inputs("plain"))
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
    mine, true = (one(ids, labels=ignored).loss for one in (module, eager("gpt2")))
    torch.testing.assert_close(full(mine), true, rtol=1e-6, atol=0)  # of logits in float32


def _whole_weights() -> Any:
    """For a model of HuggingFace's own, which can generate."""
    module = compiled("gpt2", example_inputs=((), zoo.inputs("gpt2")))
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(UnsupportedError, match=r"pass state_dict=state.*full_state_dict=True"):
            module.save_pretrained(folder)
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(module, options=options)
        module.save_pretrained(folder, state_dict=state)
        if dist.get_rank() == 0:  # the one that transformers lets write
            found = type(eager("gpt2")).from_pretrained(folder, dtype=torch.float64).state_dict()
            torch.testing.assert_close(found, eager("gpt2").state_dict(), rtol=0, atol=0)
    return None


def _code() -> Any:
    module = compiled("gpt2", example_inputs=((), zoo.inputs("gpt2")))
    shown = module.diff("capture", "final")
    assert any(entry.collective for entry in shown.entries)
    return module.code


CHECKS = (
    _bitwise,
    _buffers,
    _checkpoint_with_dropout,
    _distributed_checkpoint,
    _errors,
    _frozen,
    _gradients_in_many_ways,
    _hooks,
    _in_place,
    _mismatches,
    _modes,
    _optimizers,
    _options,
    _pretrained,
    _state,
    _whole_weights,
)


def _all() -> dict[str, Any]:
    """Every check in one group; a failure is returned as text, so that it hides no other."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for check in (*CHECKS, _training, _gradients_of_inputs, _outputs, _code):
        try:
            results[check.__name__] = check()
        except BaseException:  # assertion errors and what pytest.raises throws
            results[check.__name__] = AssertionError(traceback.format_exc())
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, _all)


def result(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    """What the check returned on each rank."""
    found = [results[name] for results in ranks]
    for value in found:
        if isinstance(value, AssertionError):
            raise value
    return found


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
    kinds = ["DTensor", "Tensor", "Tensor", "Tensor", "DTensor", "DTensor"]
    assert result(ranks, "_outputs") == [kinds, kinds]


def test_ranks_run_the_same_text(ranks: list[dict[str, Any]]) -> None:
    first, second = result(ranks, "_code")
    assert first == second


def _three() -> dict[str, Any]:
    """Three ranks, which divide neither 4 heads, nor 32 columns, nor 128 words."""
    warnings.simplefilter("ignore")
    module = compiled(dropout=0.1)
    return {"training": train(module), "fallbacks": list(module.plan.fallbacks)}


def test_ranks_that_fit_nothing_in_the_model(expected: dict[str, Any]) -> None:
    for found in run_on_ranks(3, _three):
        assert_same_training(found["training"], expected)
        assert any("no dim divides by 3" in line for line in found["fallbacks"])


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
