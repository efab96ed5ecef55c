"""Calls of a module, and of one over several ranks, of which this process plays the first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.runtime.group import device_type_of
from tests.helpers import users


def test_an_empty_batch_cannot_decide_how_parameters_are_sharded(mesh: DeviceMesh) -> None:
    module = sp_compiler.compile(users.net(), mesh=mesh)
    with pytest.raises(ArgumentError, match=r"x has shape \(2, 0, 8\).*the first call decides"):
        module(users.batch(2, 0))


def test_a_model_on_meta_is_loaded_to_the_devices_of_its_mesh(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine with accelerators, where a model without a mesh goes to one of them."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    model = users.net().to("meta")
    assert device_type_of(model) == "cuda"
    assert device_type_of(sp_compiler.compile(model, mesh=mesh)) == "cpu"


class Scattered(nn.Module):
    """Its scatter has no rule among those of DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).detach()
        places = torch.zeros(x.shape, dtype=torch.int64)
        return self.down(torch.scatter(y, 1, places, x, reduce="multiply")).square().mean()


@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_what_dtensor_has_no_rule_for_is_checked_as_without_a_module(mesh: DeviceMesh) -> None:
    """A module lets DTensors run it on full tensors, which a check on the meta device cannot."""
    x = torch.randn(2, 8, 16)
    module = sp_compiler.compile(Scattered(), mesh=mesh, example_inputs=((x,), {}))
    assert module.get_parameter("up.weight").placements == (Shard(0),)
    module(x).backward()
    assert module.get_parameter("down.weight").grad is not None


class _Counting(nn.Module):
    """Writes into a buffer, and leaves a tensor in an attribute, beside what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.largest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(result.mean())
        self.largest = result.detach().amax()
        return result


def test_hooks_see_what_the_block_returns_and_no_buffer() -> None:
    model = nn.Sequential(_Counting(), _Counting(), nn.Tanh())
    x = torch.randn(2, 4, dtype=torch.float64)
    expected, seen = copy.deepcopy(model), list[int]()
    module = sp_compiler.compile(model, tp=1, example_inputs=((x,), {}))
    for one in (expected, module):
        block = one.get_submodule("1")
        block.register_forward_hook(lambda _, args, output: output * 1.5)
        block.register_full_backward_hook(lambda _, into, out: seen.append(len(out)))
        one(x.clone().requires_grad_()).sum().backward()
    assert seen == [1, 1]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)
    torch.testing.assert_close(dict(module.named_buffers()), dict(expected.named_buffers()))


class _Table(nn.Module):
    """Adds rows from the end of a buffer, whose positions depend on its length."""

    table: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(8, 4))
        self.register_buffer("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.table[-x.shape[0] :] + self.table.sum(0) / self.table.shape[0]
        if self.table.dtype == torch.bfloat16:
            x = x * 2
        return x if self.bias is None else x + self.bias


@pytest.mark.parametrize("table", [torch.randn(16, 4), torch.randn(8, 4).bfloat16()])
def test_another_buffer_in_place_of_one_is_read(
    table: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    module = sp_compiler.compile(copy.deepcopy(model := _Table()), tp=1)
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), model(x))
    module.table = model.table = table
    torch.testing.assert_close(module(x), model(x))
    assert "is compiled again for buffer table " in caplog.text
    with pytest.raises(UnsupportedError, match=r"cannot set buffer 'bias'.*None, to a tensor"):
        module.bias = torch.ones(4)
    with pytest.raises(UnsupportedError, match=r"'table'.*, which was a tensor, to None"):
        module.table = None
