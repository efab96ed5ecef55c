"""Calls in inference mode and casts of a module on a data axis, whose gathered parameters FSDP2
keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import batch, net


def _assert_trains_like(model: nn.Module, module: Any, dtype: torch.dtype) -> None:
    part = torch.distributed.get_rank()
    for either, x in ((model, batch()), (module, batch().chunk(2)[part])):
        either.zero_grad()
        either(x.to(dtype))["loss"].backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name, parameter in model.named_parameters():
        actual = grids.whole(module.get_parameter(name).grad)
        torch.testing.assert_close(actual, parameter.grad, rtol=tolerance, atol=tolerance)


def _called_and_cast(axis: str) -> None:
    mesh, model = grids.mesh(**{axis: 2, "tp": 1}), net()
    x = batch().chunk(2)[torch.distributed.get_rank()]
    module: Any = sp_compiler.compile(net(), mesh=mesh, example_inputs=((x,), {}))
    with torch.inference_mode():
        assert module(x)["loss"].is_inference()
    _assert_trains_like(model, module, torch.float64)
    for dtype in (torch.float32, torch.float64):
        for either in (model, module):
            either.to(dtype)
        _assert_trains_like(model, module, dtype)
    with module.no_sync():
        module(x)["loss"].backward()
    with pytest.raises(UnsupportedError, match=r"module\.to.*no_sync.*zero_grad"):
        module.float()
    _assert_trains_like(model, module, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
def test_calls_in_inference_mode_and_casts(axis: str) -> None:
    run_on_ranks(2, _called_and_cast, axis)
