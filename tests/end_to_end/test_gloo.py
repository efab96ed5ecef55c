"""Whole models through ``sp_compiler.compile`` on real ranks: processes that talk over gloo."""

from __future__ import annotations

import functools
import hashlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import sp_compiler
from sp_compiler import api
from sp_compiler.base.placement import I, Placement
from sp_compiler.base.shards import join_parts
from sp_compiler.runtime.padding import stored_part
from tests.helpers import parity
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.shared_programs import compiled_again
from tests.models import architectures, zoo

# Fast tests on real ranks are in ``test_two_ranks``.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

# What differs where processes talk: fused and tied weights, two stacks, padded rows, rows in dim 0,
# weights without gradients. Of all other models simulated ranks show the numbers.
_MODELS = ("gpt2", "t5", "vit", "encoder_seqfirst", "lora")
# Of each stack. The one with tied weights has two, and those whose first layer differs.
_LAYERS = {"gpt2": 2, "lora": 2}
_SIZE = (3, 13)
_ARCHITECTURES = ("phi3", "mixtral")
_DIVIDING = architectures.size("dividing", 2)
# What "auto" makes of both, and the other one.
_OUTPUTS = (
    ("gpt2", "auto"),
    ("gpt2", "replicate"),
    ("gpt2_logits", "auto"),
    ("gpt2_logits", "shard"),
)

Local = dict[str, tuple[str, Tensor]]
"""Name to the text of a placement and this rank's part."""


def _compile(name: str, *, dropout: float = 0.0, layers: int | None = None, **options: Any) -> Any:
    """A zoo model for the default group."""
    layers = layers or _LAYERS.get(name, 1)
    return _lifted(zoo.build(name, dropout=dropout, layers=layers), **options)


def _lifted(model: nn.Module, **options: Any) -> Any:
    """Any model for the default group, with its casts to float32 lifted."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    module = sp_compiler.compile(model, tp=world_size, **options)
    compile_for = module._sp_state.build

    def lifted(*args: Any) -> Any:
        with mock.patch.object(api, "build", functools.partial(api.build, lift_casts=True)):
            return compile_for(*args)

    module._sp_state.build = lifted
    return module


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gradients(module: Any) -> Local:
    """Gradients in parts: each is this rank's part of the gradient that a user sees."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    placements, parts = module._sp_state.layout.placements, {}
    for name, parameter in module.named_parameters():
        for value in (parameter.detach(), parameter.grad):
            if value is not None:
                cut = stored_part(_full(value), placements.get(name, I), rank, world_size)
                assert torch.equal(cut, _local(value)), name
        if parameter.grad is not None:
            parts[name] = (str(module._sp_state.fixed[name]), _local(parameter.grad).clone())
    return parts


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _step(module: Any, name: str) -> Tensor:
    first = _first(module(**zoo.inputs(name, *_SIZE)))
    first.backward(torch.ones_like(first))
    return first.detach()


# What each rank does.


def _models(names: tuple[str, ...]) -> dict[str, tuple[Tensor, Local, str]]:
    """First output, gradients and a digest of the code of each model."""
    return {name: _model(_compile(name), name) for name in names}


def _model(module: Any, name: str) -> tuple[Tensor, Local, str]:
    first = _step(module, name)
    return first, _gradients(module), _digest(module)


def _architectures(names: tuple[str, ...]) -> dict[str, tuple[Tensor, Local, str]]:
    """The same of architectures that people train."""
    found = {}
    with architectures.float64():
        for name in names:
            module = _lifted(architectures.build(name, _DIVIDING))
            first = _first(module(**architectures.inputs(name, _DIVIDING)))
            first.backward()
            found[name] = (first.detach(), _gradients(module), _digest(module))
    return found


def _digest(module: Any) -> str:
    return hashlib.sha256(module.code.encode()).hexdigest()


def _train(module: Any, name: str, steps: int = 10) -> dict[str, Any]:
    """AdamW with clipping; the norms, losses and whole parameters at the end."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    norms, losses = [], []
    for step in range(steps):
        loss = _first(module(**zoo.inputs(name, *_SIZE, seed=step)))
        loss.backward()
        norms.append(_full(nn.utils.clip_grad_norm_(module.parameters(), 1.0)).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {key: _full(value).detach().clone() for key, value in module.state_dict().items()}
    tied = getattr(module, "transformer", None)
    return {
        "norms": norms,
        "losses": losses,
        "state": state,
        "tied": tied is None or tied.wte.weight is module.lm_head.weight,
    }


def _logits(module: Any, name: str) -> tuple[Tensor, Any]:
    """Logits, with their placements where they are sharded."""
    logits = module(**zoo.inputs(name, *_SIZE)).logits
    placements = logits.placements if isinstance(logits, DTensor) else ()
    return _full(logits).detach(), placements


def _twice() -> bool:
    """Return whether two compilations with dropout are the same bit for bit."""
    torch.use_deterministic_algorithms(True)
    runs = []
    for _ in range(2):
        module = _compile("plain", dropout=0.1, layers=1)
        torch.manual_seed(3)
        with compiled_again():
            loss = _step(module, "plain")
        runs.append((loss, [part for _, part in _gradients(module).values()]))
    torch.use_deterministic_algorithms(False)
    (loss_a, grads_a), (loss_b, grads_b) = runs
    return torch.equal(loss_a, loss_b) and all(map(torch.equal, grads_a, grads_b))


def _compiled_on_each() -> dict[str, Any]:
    """What every rank compiles by itself, so that codes can be compared."""
    module = _compile("gpt2")  # compiled once for all that is asked of it
    outputs = {_OUTPUTS[0]: _logits(module, "gpt2")}
    models = {"gpt2": _model(module, "gpt2"), **_models(_MODELS[1:])}
    module.zero_grad()
    return {
        "models": models,
        "architectures": _architectures(_ARCHITECTURES),
        "train": {"gpt2": _train(module, "gpt2")},
        "outputs": outputs,
        "twice": _twice(),
    }


def _compiled_once() -> dict[str, Any]:
    """What a process has compiled whose copies the ranks are."""
    return {
        "tensor parallel alone": _model(_compile("gpt2", sequence_parallel=False), "gpt2"),
        "train": {"plain_unfused": _train(_compile("plain_unfused"), "plain_unfused")},
        "outputs": {
            (name, setting): _logits(_compile(name, outputs=setting, layers=1), name)
            for name, setting in _OUTPUTS[1:]
        },
    }


def _compile_once() -> None:
    _step(_compile("gpt2", sequence_parallel=False), "gpt2")
    _step(_compile("plain_unfused"), "plain_unfused")
    for name, setting in _OUTPUTS[1:]:
        _logits(_compile(name, outputs=setting, layers=1), name)


def _everything() -> dict[str, Any]:
    found, more = _compiled_on_each(), _compiled_once()
    # Both have training and outputs.
    shared = {kind: {**found[kind], **more[kind]} for kind in found.keys() & more.keys()}
    return {**found, **more, **shared}


# What comes back.


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """One start of two processes for all tests on two ranks."""
    return run_rehearsed(2, _everything, rehearsal=_compile_once)


def _check_model(name: str, results: list[dict[str, tuple[Tensor, Local, str]]]) -> None:
    _check(_case(name, _LAYERS.get(name, 1)), [result[name] for result in results])


@functools.cache
def _case(name: str, layers: int) -> parity.Case:
    return parity.make_case(zoo.build(name, layers=layers), zoo.inputs(name, *_SIZE))


def _check(found: parity.Case, results: list[tuple[Tensor, Local, str]]) -> None:
    firsts, locals_, digests = zip(*results, strict=True)
    expected = next(item for item in found.outputs if isinstance(item, Tensor))
    for first in firsts:
        assert torch.equal(first, firsts[0])
    assert float((firsts[0] - expected).abs().max()) < 1e-10 * float(expected.abs().max())
    grads: dict[str, Tensor | None] = {
        key: join_parts([local[key][1] for local in locals_], Placement.parse(text))
        for key, (text, _) in locals_[0].items()
    }
    assert parity.gradient_error(grads, found.grads) < 1e-10
    assert len(set(digests)) == 1


@pytest.mark.parametrize("name", _MODELS)
def test_models(name: str, ranks: list[dict[str, Any]]) -> None:
    """Loss and gradients; every rank prints the same code."""
    _check_model(name, [result["models"] for result in ranks])


def test_tensor_parallel_alone(ranks: list[dict[str, Any]]) -> None:
    """All-reduces, which write into what they are given."""
    _check(_case("gpt2", _LAYERS.get("gpt2", 1)), [each["tensor parallel alone"] for each in ranks])


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_architectures(name: str, ranks: list[dict[str, Any]]) -> None:
    found = architectures.case(name, _DIVIDING)
    _check(found, [result["architectures"][name] for result in ranks])


def test_four_ranks() -> None:
    """llama's two key and value heads are fewer than ranks."""
    _check_model("llama", run_rehearsed(4, _models, ("llama",)))


@pytest.mark.parametrize("name", ["gpt2", "plain_unfused"])
def test_training_follows_one_rank(name: str, ranks: list[dict[str, Any]]) -> None:
    """Ten steps: the true gradient norm, the same losses and whole state, ties kept."""
    alone = _train(_compile(name), name)
    for result in ranks:
        train = result["train"][name]
        assert train["tied"] == alone["tied"] is True
        torch.testing.assert_close(train["norms"], alone["norms"], rtol=1e-8, atol=0)
        torch.testing.assert_close(train["losses"], alone["losses"], rtol=1e-8, atol=0)
        assert list(train["state"]) == list(alone["state"])
        torch.testing.assert_close(train["state"], alone["state"], rtol=1e-8, atol=1e-8)
    assert alone["losses"][-1] != alone["losses"][0]


def test_first_norm_is_that_of_the_model(ranks: list[dict[str, Any]]) -> None:
    model = zoo.build("plain_unfused", layers=1)
    _first(model(**zoo.inputs("plain_unfused", *_SIZE, seed=0))).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert ranks[0]["train"]["plain_unfused"]["norms"][0] == pytest.approx(norm, rel=1e-10)


@pytest.mark.parametrize(("name", "outputs"), _OUTPUTS)
def test_outputs(name: str, outputs: str, ranks: list[dict[str, Any]]) -> None:
    """Logits stay sharded by vocabulary beside a loss, or where that is asked for."""
    found = _case(name, 2 if (name, outputs) == _OUTPUTS[0] else 1)
    expected = next(v for v in found.outputs if isinstance(v, Tensor) and v.dim() == 3)
    sharded = outputs == "shard" or (outputs == "auto" and name == "gpt2")
    for result in ranks:
        logits, placements = result["outputs"][name, outputs]
        assert placements == ((Shard(2),) if sharded else ())
        assert float((logits - expected).abs().max()) < 1e-10 * float(expected.abs().max())


def test_runs_are_bitwise_equal(ranks: list[dict[str, Any]]) -> None:
    assert [result["twice"] for result in ranks] == [True, True]
