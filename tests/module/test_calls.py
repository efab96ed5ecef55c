"""Calls of a module over several ranks, of which this process plays the first."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

import sp_compiler
from sp_compiler import ArgumentError
from tests.helpers import users


def test_an_empty_batch_cannot_decide_how_parameters_are_sharded(mesh: DeviceMesh) -> None:
    module = sp_compiler.compile(users.net(), mesh=mesh)
    with pytest.raises(ArgumentError, match=r"x has shape \(2, 0, 8\).*the first call decides"):
        module(users.batch(2, 0))
