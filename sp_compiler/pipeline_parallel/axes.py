"""The ranks of a pipeline, which work on different stages of the same batch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sp_compiler.runtime.group import TensorParallelGroup, watched_group
from sp_compiler.runtime.mesh_axes import PIPELINE_AXIS, named_axis

_EXAMPLE = (
    "for example torch.distributed.device_mesh.init_device_mesh(device_type, (2, 2), "
    'mesh_dim_names=("pp", "tp")) in each of 4 processes that torchrun started'
)


@dataclass(frozen=True)
class PipelineAxis:
    """This process among the ranks of the axis "pp".

    Attributes:
        group: process group of those ranks.
        rank: this rank in the group.
        watched: the same ranks with a board, to compare what must be equal on all stages.
    """

    group: dist.ProcessGroup
    rank: int
    watched: TensorParallelGroup

    @property
    def size(self) -> int:
        return self.group.size()


def pipeline_axis(mesh: DeviceMesh | None, rank_timeout: timedelta) -> PipelineAxis:
    """Return the axis "pp" of ``mesh``, whose ranks wait for each other for ``rank_timeout``.

    Raises:
        ArgumentError: no mesh, or one without the axis.
    """
    remark = "without stages use sp_compiler.compile(model, mesh=mesh)"
    axis = named_axis(mesh, PIPELINE_AXIS, user="a pipeline", example=_EXAMPLE, remark=remark)
    group = axis.get_group()
    return PipelineAxis(group, group.rank(), watched_group(axis, rank_timeout, "pipeline"))
