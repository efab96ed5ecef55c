"""The norm of gradients and the clipping, beside torch's own on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import sp_compiler
from sp_compiler import ArgumentError
from sp_compiler.module.dtensors.segmented_shard import segmented_shard


def _model(*dtypes: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 5).to(dtype) for dtype in dtypes)
    for parameter in layers.parameters():
        parameter.grad = torch.randn_like(parameter)
    list(layers.parameters())[1].grad = None
    return layers


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("p", [2.0, 1.0, 0.5, float("inf")])
def test_norms_of_every_kind(p: float, foreach: bool | None) -> None:
    ours = _model(torch.float64, torch.float64)
    theirs = copy.deepcopy(ours)
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        second.grad = None if first.grad is None else first.grad.clone()
    norm = sp_compiler.clip_grad_norm_(ours, 0.7, p, foreach=foreach)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.7, p))
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        if first.grad is not None:
            torch.testing.assert_close(first.grad, second.grad)


def test_a_small_norm_is_left_alone() -> None:
    model = _model(torch.float64)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sp_compiler.clip_grad_norm_(model, 1e9)
    assert all(map(torch.equal, before, [p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize(
    ("placement", "parts"),
    [
        (Replicate(), 1),
        (Shard(0), 2),
        (_StridedShard(0, split_factor=2), 2),
        (segmented_shard(0, (6, 2)), 2),
    ],
    ids=["replicated", "shard", "strided", "segments"],
)
def test_every_kind_of_shard_counts_the_other_ranks_parts(
    placement: Placement, parts: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other rank has the same numbers.
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, *_, **__: numbers.mul_(2))
    weight = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [placement]))
    weight.grad = DTensor.from_local(torch.ones(4, 3), mesh, [placement])
    norm = sp_compiler.clip_grad_norm_(nn.ParameterList([weight]), 1.0)
    torch.testing.assert_close(norm, torch.tensor(12.0 * parts).sqrt())


def test_low_precision_is_summed_in_float32() -> None:
    model = _model(torch.bfloat16, torch.float32)
    true = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    norm = sp_compiler.clip_grad_norm_(model, 1e9)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), true.norm(), rtol=1e-6, atol=0)


def test_no_gradients() -> None:
    assert sp_compiler.clip_grad_norm_(nn.Linear(2, 2), 1.0) == 0


def test_what_is_no_number() -> None:
    model = _model(torch.float64)
    grad = next(model.parameters()).grad
    assert grad is not None
    grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="total norm of order 2"):
        sp_compiler.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert sp_compiler.clip_grad_norm_(model, 1.0).isinf()


@pytest.mark.parametrize(
    ("max_norm", "p", "message"),
    [
        (-1.0, 2.0, "max_norm=-1.0: expected 0 or more"),
        (1.0, 0.0, "norm_type=0.0: expected a positive"),
        (1.0, float("nan"), "norm_type=nan: expected a positive"),
        (None, 2.0, "max_norm=None: expected a number"),
        (1.0, "two", "norm_type='two': expected a number"),
    ],
)
def test_arguments(max_norm: Any, p: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sp_compiler.clip_grad_norm_(nn.Linear(2, 2), max_norm, p)


def test_parameters_instead_of_the_module() -> None:
    with pytest.raises(ArgumentError, match=r"expected the module .* itself"):
        sp_compiler.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)  # type: ignore[arg-type]
