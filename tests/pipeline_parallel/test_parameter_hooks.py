"""Hooks of parameters run as in eager code, also where weight gradients come later."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from tests.helpers.fake_group import fake_group
from tests.models import zoo

_MICROBATCHES = 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    "frozen",
    [
        ("token_embedding.weight", "position_embedding.weight"),  # nothing below the first layer
        (),  # with the head, which is the table of tokens, the gradient of which has two parts
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_hooks_run_once_a_microbatch_with_its_gradient(
    frozen: tuple[str, ...], schedule: str
) -> None:
    model = zoo.build("plain", layers=2)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    eager, batch = copy.deepcopy(model), zoo.inputs("plain", 4, 8)
    with fake_group(1):
        pipeline = sp_compiler.pipeline(
            model,
            mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp")),
            example_inputs=((), batch),
            microbatches=_MICROBATCHES,
            schedule=schedule,
        )
        trained = {name: p for name, p in pipeline.named_parameters() if p.requires_grad}
        calls = _hooked(trained)
        pipeline.step(**batch)
    assert calls == dict.fromkeys(trained, _MICROBATCHES)
    _hooked({name: eager.get_parameter(name) for name in trained})
    for number in range(_MICROBATCHES):
        part = {name: value.chunk(_MICROBATCHES)[number] for name, value in batch.items()}
        (zoo.loss_of(eager(**part)) / _MICROBATCHES).backward()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad)


def _hooked(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Put on hooks that see a sum and its parts apart; counts of the hooks behind them."""
    calls = dict.fromkeys(parameters, 0)
    for name, parameter in parameters.items():
        parameter.register_hook(lambda grad: grad / grad.norm())

        def count(_: Tensor, name: str = name) -> None:
            calls[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    return calls
