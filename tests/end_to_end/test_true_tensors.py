"""Parameters and gradients that a user reaches are the model's own tensors.

A DTensor is right or wrong by its shape and placement, so each kind that sharding gives a parameter
on 2, 3 or 4 ranks is looked at once, on simulated ranks with torch's own DTensor. That the ranks'
parts of a gradient are those of its placement is what the tests of parity show.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sp_compiler import UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.module.parameters import mesh_placement, tensor_spec
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.runtime.padding import stored_part
from tests.helpers.fake_group import fake_group
from tests.models import architectures

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


# By the number of ranks. Together they have each combination of dims, placement, fused parts and
# units that any of the 59 architectures has if these numbers take turns.
_NAMES = {
    2: ("gpt_oss", "nanogpt", "qwen3_next", "siglip"),
    3: ("beit", "clip", "deepseek_v3", "gpt2", "phi3", "roberta"),
    4: ("deit", "mamba", "qwen3_moe", "torch_TransformerEncoder"),
}


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, names in _NAMES.items() for name in names]
)
def test_parameters_and_gradients_are_true(ranks: int, name: str) -> None:
    """Powers of two are widths that 3 ranks do not divide: padded, or replicated."""
    case = architectures.case(name, architectures.size("dividing", 2))
    placements = shard(case.program, CompileOptions(tp=ranks)).param_placements
    for parameter, where in placements.items():
        _check_kind(tuple(case.params[parameter].shape), where, ranks)


@functools.cache
def _check_kind(shape: tuple[int, ...], where: Placement, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    value, grad, other = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    with fake_group(ranks), LocalTensorMode(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        _check_dtensors(value, grad, other, where, mesh)


def _check_dtensors(
    value: Tensor, grad: Tensor, other: Tensor, where: Placement, mesh: DeviceMesh
) -> None:
    placed = mesh_placement(where)
    parameter = torch.nn.Parameter(_stored(value, where, mesh))
    parameter.grad = _stored(grad, where, mesh)
    _same(parameter.detach(), value)
    _same(parameter.grad, grad)
    _same(distribute_tensor(_copies(value, mesh), mesh, [placed]), value)
    for to in (Replicate(), Shard(0)) if value.dim() else (Replicate(),):
        there = parameter.detach().redistribute(mesh, [to])
        _same(there, value)
        _same(there.redistribute(mesh, [placed]), value)
    _same(
        parameter.detach() + distribute_tensor(_copies(other, mesh), mesh, [Replicate()]),
        value + other,
    )
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    optimizer.step()
    _same(optimizer.state[parameter]["momentum_buffer"], grad)
    _same(parameter.detach(), value - 0.5 * grad)
    if grad.dim() == 2:  # as Muon and Shampoo do: products of matrices and of their transposes
        try:
            gram = parameter.grad @ parameter.grad.mT
        except (RuntimeError, UnsupportedError):  # no rule for it, which is no wrong number
            return
        torch.testing.assert_close(_full(gram), grad @ grad.mT, rtol=1e-12, atol=1e-12)


def _stored(full: Tensor, where: Placement, mesh: DeviceMesh) -> DTensor:
    """``full`` as the ranks store a parameter, or its gradient, that is placed so."""
    size = mesh.size()
    parts = {rank: stored_part(full, where, rank, size) for rank in range(size)}
    spec = tensor_spec(mesh, full.shape, full.dtype, where)
    return DTensor(LocalTensor(parts), spec, requires_grad=False)


def _copies(full: Tensor, mesh: DeviceMesh) -> LocalTensor:
    """``full`` as every rank has it: of a plain tensor all ranks would be sent rank 0's part."""
    return LocalTensor({rank: full.clone() for rank in range(mesh.size())})


def _full(value: Any) -> Tensor:
    """A DTensor as every rank sees it."""
    full = cast(Tensor, value.full_tensor())
    if not isinstance(full, LocalTensor):  # what was replicated as a plain tensor stays one
        return full
    first, *others = full._local_tensors.values()
    assert all(torch.equal(other, first) for other in others)
    return first


def _same(value: Any, expected: Tensor) -> None:
    torch.testing.assert_close(_full(value), expected, rtol=1e-15, atol=1e-15)
