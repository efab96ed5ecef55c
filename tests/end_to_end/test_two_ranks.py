"""One model on two processes: what simulated ranks cannot see, short enough for every run.

Loading parameters that are sharded in segments, reductions that are put off, parameters that are
changed in place between steps: each is followed by a step, compared with the model on one device.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_NAME = "plain"
Step = Callable[[Any, nn.Module], None]


def _model(seed: int) -> nn.Module:
    model = zoo.build(_NAME, layers=1)
    zoo.randomise(model, seed)
    return model.double()


def _loss(model: Any) -> Tensor:
    return zoo.loss_of(model(**zoo.inputs(_NAME)))


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _loaded_parameters(module: Any, model: nn.Module) -> None:
    """Full tensors of another model; the fused projection is cut in segments."""
    other = _model(7)
    model.load_state_dict(other.state_dict())
    module.load_state_dict(other.state_dict())
    for name, value in module.full_state_dict().items():  # on rank 0; the other has none
        assert torch.equal(value, other.state_dict()[name]), name
    _loss(model).backward()
    _loss(module).backward()


def _loaded_part_of_another_rank(module: Any, model: nn.Module) -> None:
    """Copies can be pickled, and what rank 0 pickles is its own part."""
    name = "blocks.0.mlp.up.weight"
    weight = module.state_dict()[name]
    saved = [pickle.dumps(weight.clone())]
    dist.broadcast_object_list(saved)
    loaded = pickle.loads(saved[0])
    if dist.get_rank() == 0:
        module.load_state_dict({name: loaded}, strict=False)
    else:
        with pytest.raises(UnsupportedError, match=r"part of rank 0, but this is rank 1"):
            module.load_state_dict({name: loaded}, strict=False)
    _loss(model).backward()
    _loss(module).backward()


def _broadcast_weights(module: Any, model: nn.Module) -> None:
    """Rank 0 alone has the full tensors, as recipes for FSDP2 load them."""
    other = _model(8)
    model.load_state_dict(other.state_dict())
    state = dict(other.state_dict()) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, state, options=options)
    _loss(model).backward()
    _loss(module).backward()


def _put_off_reductions(module: Any, model: nn.Module) -> None:
    for _ in range(3):
        _loss(model).backward()
    with module.no_sync():
        _loss(module).backward()
        _loss(module).backward()
    _loss(module).backward()


def _changed_in_place(module: Any, model: nn.Module) -> None:
    for one in (module, model):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.9).add_(0.01)
        _loss(one).backward()


def _optimizer_step(module: Any, model: nn.Module) -> None:
    for one in (module, model):
        _loss(one).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        assert f"{norm:.3f}" == f"{norm.item():.3f}"
        torch.optim.AdamW(one.parameters(), lr=0.1).step()
        one.zero_grad()
        _loss(one).backward()


def _mixed_with_a_parameter(module: Any, model: nn.Module) -> None:
    """The gradient of the loss is a sum that each rank has a part of."""
    for one in (module, model):
        penalty = one.get_parameter("blocks.0.mlp.up.weight").square().sum()
        _full(_loss(one) * penalty).backward()


def _losses_on_logits(module: Any, model: nn.Module) -> None:
    """Sharded logits beside plain tensors: a user's own loss, with a weight of its own."""
    inputs = zoo.inputs(_NAME)
    weights = []
    for one in (module, model):
        logits, ids = one(**inputs)[1], inputs["input_ids"]
        weight = torch.linspace(0.5, 1.5, logits.shape[-1]).double().requires_grad_()
        loss = F.cross_entropy((logits[:, :-1] * weight).flatten(0, 1), ids[:, 1:].flatten())
        loss = loss + 0.1 * torch.logsumexp(logits, -1).square().mean() + logits.square().mean()
        # Indices that depend on numbers have no rule: the full tensor is read.
        loss = loss + logits[ids > 3].mean()
        assert type(loss) is Tensor
        loss.backward()
        weights.append(weight.grad)
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-12)


def _metrics_on_logits(module: Any, model: nn.Module) -> None:
    inputs = zoo.inputs(_NAME)
    ids = inputs["input_ids"]
    outputs = [one(**inputs)[1].detach() for one in (module, model)]
    logits, expected = outputs
    assert isinstance(logits, DTensor)
    assert isinstance(logits[:, -1], DTensor), "a part of the sequence needs no gather"
    for metric in (
        lambda x: (x.argmax(-1) == ids).double().mean(),
        lambda x: x.topk(3, -1).values,
        lambda x: x.repeat(4, 1, 1).sort(-1).values,
        lambda x: x.repeat(4, 1, 1).max(-1).values,
        lambda x: x.cumsum(-1),
        lambda x: x.gather(-1, ids[..., None]),
        lambda x: torch.zeros_like(ids).double() + x.sum(-1),
        lambda x: torch.tensor(x.tolist()).double(),
    ):
        result = metric(logits)
        assert type(result) is Tensor
        torch.testing.assert_close(result, metric(expected), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), rtol=1e-8, atol=1e-10)
    for each in outputs:
        each.mul_(2).put_(torch.tensor([0]), torch.ones(1).double())
    torch.testing.assert_close(_full(logits), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(UnsupportedError, match="full_tensor"):
        logits.transpose_(0, 1)
    with pytest.raises(RuntimeError, match="size"):  # torch's own words for a mistake
        logits + torch.zeros(3)
    for one in (module, model):
        _loss(one).backward()


_STEPS: tuple[Step, ...] = (
    _losses_on_logits,
    _metrics_on_logits,
    _loaded_parameters,
    _loaded_part_of_another_rank,
    _broadcast_weights,
    _put_off_reductions,
    _changed_in_place,
    _optimizer_step,
    _mixed_with_a_parameter,
)


def _errors() -> dict[str, float]:
    """The worst error of loss and parameters after each of the steps and one of descent."""
    model = _model(0)
    module: Any = sp_compiler.compile(copy.deepcopy(model), tp=2)
    _loss(module)
    errors = {}
    for step in _STEPS:
        module.zero_grad()
        model.zero_grad()
        step(module, model)
        # What the gradients are, read from parameters, which are true however they are stored.
        for one in (module, model):
            torch.optim.SGD(one.parameters(), lr=0.5).step()
        worst = float((_loss(module) - _loss(model)).abs().detach())
        true = model.state_dict()
        for name, entry in module.state_dict().items():
            worst = max(worst, float((_full(entry) - true[name]).abs().max()))
        errors[step.__name__] = worst
    return errors


def test_steps_on_two_processes() -> None:
    for errors in run_on_ranks(2, _errors):
        assert max(errors.values()) < 1e-10, errors
