"""Calls of a module over several ranks, of which this process plays the first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sp_compiler
from sp_compiler import ArgumentError
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
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        y = self.up(x).relu()
        scale = torch.scatter(y.detach(), 1, places, x, reduce="multiply")
        return self.down(y * scale).square().mean()


@pytest.mark.filterwarnings("ignore:costly parts", "ignore:The reduce argument")
def test_what_dtensor_has_no_rule_for_is_checked_as_without_a_module(mesh: DeviceMesh) -> None:
    """A module lets DTensors run it on full tensors, which a check on the meta device cannot."""
    inputs = torch.randn(2, 4, 8), torch.zeros(2, 4, 8, dtype=torch.int64)
    model = Scattered()
    expected = model(*inputs).item()
    module = sp_compiler.compile(model, mesh=mesh)
    loss = module(*inputs)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
