"""Weights, optimizers and checkpoints on two gloo ranks, through the public API."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.rehearsal import run_rehearsed
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
        paths = [Path(folder, "state.pt")]
        dist.broadcast_object_list(paths, src=0)
        with pytest.raises(UnsupportedError, match=r"full_state_dict\(\) on all ranks"):
            torch.save(module.state_dict(), Path(folder, "part.pt"))
        state = module.full_state_dict()
        if dist.get_rank() == 0:
            torch.save(state, paths[0])
        dist.barrier()
        other.load_state_dict(torch.load(paths[0]))
        dist.barrier()  # before the folder goes
    assert other(**inputs).loss.item() == loss
    return None


def _optimizers() -> Any:
    """Results that the README calls exact: as on one device."""
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
        "Rprop": {},
        "Adafactor": {},
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


CHECKS = (
    _distributed_checkpoint,
    _optimizers,
    _pretrained,
    _state,
    _whole_weights,
)


def _all() -> dict[str, Any]:
    return run_checks(CHECKS)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_rehearsed(2, _all)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    assert result(ranks, name) == [None, None]
