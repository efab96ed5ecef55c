"""Hooks of parameters run as in eager code, also where weight gradients come later."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from tests.helpers.fake_group import fake_group
from tests.models import zoo

_MICROBATCHES = 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_hooks_run_once_a_microbatch_with_its_gradient(schedule: str) -> None:
    # Nothing below the first layer has a gradient.
    model = zoo.build("plain", layers=2)
    for name in ("token_embedding.weight", "position_embedding.weight"):
        model.get_parameter(name).requires_grad_(False)
    eager, batch = copy.deepcopy(model), zoo.inputs("plain", 4, 8)
    gradients: collections.Counter[str] = collections.Counter()
    sums: collections.Counter[str] = collections.Counter()
    with fake_group(1):
        pipeline = sp_compiler.pipeline(
            model,
            mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp")),
            example_inputs=((), batch),
            microbatches=_MICROBATCHES,
            schedule=schedule,
        )
        trained = {name: p for name, p in pipeline.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():

            def double(grad: Tensor, name: str = name) -> Tensor:
                gradients[name] += 1
                return grad * 2

            parameter.register_hook(double)
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: sums.update({name: 1})
            )
        pipeline.step(**batch)
    assert gradients == sums == dict.fromkeys(trained, _MICROBATCHES)
    for number in range(_MICROBATCHES):
        part = {name: value.chunk(_MICROBATCHES)[number] for name, value in batch.items()}
        (zoo.loss_of(eager(**part)) / _MICROBATCHES).backward()
    for name, parameter in trained.items():
        true, grad = eager.get_parameter(name).grad, parameter.grad
        assert true is not None
        assert grad is not None
        torch.testing.assert_close(grad, 2 * true, rtol=1e-10, atol=1e-12)
