"""Outputs that are sharded over the ranks."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sp_compiler
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.module.dtensors.patches import format_as_numbers, scan_whole_dims
from sp_compiler.module.outputs import ShardedOutput


class _Collectives(CommDebugMode):
    """Counts collectives of all DTensors.

    Torch's mode runs operations of subclasses of DTensor itself, and does not see what they run.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        types = [DTensor if issubclass(each, DTensor) else each for each in types]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def logits(mesh: DeviceMesh) -> DTensor:
    value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(1)])
    value.__class__ = ShardedOutput
    return value


@pytest.mark.parametrize(
    ("error", "calls"), [(torch.OutOfMemoryError, 1), (RuntimeError, 2), (ValueError, 1)]
)
def test_what_a_single_rank_may_raise_is_not_tried_on_full_tensors(
    logits: DTensor, error: type[Exception], calls: int
) -> None:
    """To gather them is a collective, in which one rank would wait for the others."""
    shapes = []

    def operation(value: Tensor, **_: Any) -> None:
        shapes.append(tuple(value.shape))
        raise error("no")

    with pytest.raises(error):
        ShardedOutput.__torch_function__(operation, (ShardedOutput,), (logits,))
    assert shapes == [(2, 6)] * calls


def test_sizes_are_those_of_any_tensor(logits: DTensor) -> None:
    assert type(logits.shape) is type(logits.size()) is torch.Size
    assert logits.shape.numel() == 12


def test_numbers_format_as_those_of_plain_tensors(mesh: DeviceMesh) -> None:
    format_as_numbers()
    number, unknown = (
        DTensor.from_local(torch.full((), 1.25, device=device), mesh, [Replicate()])
        for device in ("cpu", "meta")
    )
    assert f"{number:.1f}" == f"{torch.tensor(1.25):.1f}"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{unknown:.1f}"


def test_a_part_is_not_saved_as_if_it_were_all(logits: DTensor) -> None:
    with pytest.raises(UnsupportedError, match=r"only this rank's part. Save output.full_tensor"):
        torch.save({"logits": logits}, io.BytesIO())


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.topk(2).indices,
        lambda x: x.sort(-1).values,
        lambda x: x.kthvalue(2).values,
        lambda x: x.cumsum(-1),
        lambda x: x.cumsum(2, dtype=torch.float64),
        lambda x: x.cumprod(-1),
        lambda x: x.logcumsumexp(-1),
    ],
    ids=["topk", "sort", "kthvalue", "cumsum", "typed", "cumprod", "logcumsumexp"],
)
def test_what_needs_whole_rows_is_plain(
    mesh: DeviceMesh, operation: Callable[[Tensor], Tensor]
) -> None:
    """DTensor would shard it over the batch instead, by an all-to-all that gloo has not; scans
    over a dim counted from the end it would run on each part alone."""
    scan_whole_dims()
    value = DTensor.from_local(torch.ones(4, 8, 16), mesh, [Shard(2)])
    value.__class__ = ShardedOutput
    with _Collectives() as communication:
        result = operation(value)
    assert type(result) is Tensor
    assert result.shape[:2] == (4, 8)
    collectives = torch.ops.c10d_functional
    counts = dict(communication.get_comm_counts())
    # DTensor of torch 2.11 reduces the maxima of the parts, and their positions.
    assert counts in ({collectives.all_gather_into_tensor: 1}, {collectives.all_reduce: 2})


def test_scans_along_other_dims_need_no_collective(mesh: DeviceMesh) -> None:
    scan_whole_dims()
    value = DTensor.from_local(torch.ones(4, 8, 16), mesh, [Shard(2)])
    value.__class__ = ShardedOutput
    with _Collectives() as communication:
        assert type(value.cumsum(-2)) is ShardedOutput
    assert communication.get_total_counts() == 0


def test_a_function_with_an_unused_out_changes_nothing(mesh: DeviceMesh) -> None:
    """``normalize`` of torch has such a parameter, which it hands on as None."""
    value = DTensor.from_local(torch.ones(4, 16), mesh, [Shard(1)])
    value.__class__ = ShardedOutput
    assert nn.functional.normalize(value).shape == (4, 32)


class _WithScale(nn.Module):
    """Returns a parameter beside its result, as a model with a learned temperature may."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(self.up(x)) * self.scale, self.scale


def test_a_replicated_parameter_that_is_returned_is_a_plain_tensor(mesh: DeviceMesh) -> None:
    """As all other outputs that are replicated: it meets them in a loss."""
    module = sp_compiler.compile(_WithScale(), mesh=mesh)
    result, scale = module(torch.randn(2, 4, 8))
    assert type(result) is type(scale) is Tensor
    assert scale.requires_grad
    assert torch.equal(scale, torch.arange(8.0))
