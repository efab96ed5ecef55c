"""Calls of a module over several ranks, of which this process plays the first."""

from __future__ import annotations

import pytest
import torch
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
