"""Numbers that a forward reads, on which its way depends: all microbatches of a step take one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.fake_group import fake_group


class _Model(nn.Module):
    """Takes another way for negative inputs, or from its third call on."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.counts = counts
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.counts:
            self.num_calls += 1
        y = self.layers[0](x)
        if self.num_calls > 2 if self.counts else x.min() < 0:
            y = 3 * y
        return {"loss": y.pow(2).mean()}


def _pipeline(x: Tensor, *, counts: bool = False) -> tuple[Any, _Model]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    model = _Model(counts=counts)
    same = copy.deepcopy(model)
    pipeline = sp_compiler.pipeline(model, mesh=mesh, example_inputs=((x,), {}), microbatches=2)
    return pipeline, same


def test_microbatches_that_would_take_two_ways() -> None:
    positive = torch.rand(4, 8)
    mixed = torch.cat([positive[:2], -positive[2:]])
    message = r"x.min\(\) < 0.* -> False for microbatch 0 and True for microbatch 1"
    with fake_group(1):
        pipeline, model = _pipeline(positive)
        with pytest.raises(UnsupportedError, match=message):
            pipeline.step(mixed)
        with pytest.raises(UnsupportedError, match=message):
            _pipeline(mixed)
        # All of them may take the other one.
        for x in (positive, -positive):
            torch.testing.assert_close(pipeline.step(x).float(), model(x)["loss"].detach())


def test_numbers_of_buffers_that_are_written() -> None:
    message = r"buffer 'num_calls', which it also writes: .* pass it as an argument"
    with fake_group(1), pytest.raises(UnsupportedError, match=message):
        _pipeline(torch.rand(4, 8), counts=True)


class _Fed(nn.Module):
    """Has a layer for an input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.fed = nn.Linear(8, 8)

    def forward(self, x: Tensor, more: Tensor | None = None) -> dict[str, Tensor]:
        y = self.layers[0](x)
        return {"loss": (y if more is None else y + self.fed(more)).square().mean()}


def test_inputs_that_need_parameters_which_the_example_did_not() -> None:
    x = torch.rand(4, 8)
    with fake_group(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        pipeline: Any = sp_compiler.pipeline(
            _Fed(), mesh=mesh, example_inputs=((x,), {}), microbatches=2
        )
        with pytest.raises(UnsupportedError, match=r"inputs need \['fed.bias'.*an example that"):
            pipeline.step(x, more=x)
        pipeline.step(x)
