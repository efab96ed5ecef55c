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


def _pipeline_called_and_cast() -> None:
    """Each stage captures the full model, also the parameters that other stages hold."""
    mesh, model, x = grids.mesh(pp=2, dp_shard=2, tp=1), net(), batch(8, 6)
    part, parts = sp_compiler.data_shard(mesh)
    pipeline: Any = sp_compiler.pipeline(
        net(), mesh=mesh, example_inputs=((x.chunk(parts)[part],), {}), microbatches=2
    )
    with torch.inference_mode():
        pipeline.eval_loss(x.chunk(parts)[part])
    for dtype in (torch.float64, torch.float32):
        model.zero_grad()
        pipeline.module.zero_grad()
        for either in (model, pipeline.module):
            either.to(dtype)
        model(x.to(dtype))["loss"].backward()
        pipeline.step(x.chunk(parts)[part].to(dtype))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        for name, parameter in pipeline.named_parameters():
            true = model.get_parameter(name).grad
            actual = grids.whole(parameter.grad)
            torch.testing.assert_close(actual, true, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_pipeline_in_inference_mode_and_cast() -> None:
    run_on_ranks(4, _pipeline_called_and_cast)
