"""Calls of what sends rows to their experts, on the one rank of an axis "ep" of size 1."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compiler.ops.communicator import Communicator
from tests.helpers.op_samples.draw import Args, Draw, Sample

_ALONE = Communicator(None, 0, 1)


def _routes(draw: Draw) -> Args:
    """Rows sorted by expert; the last one has none."""
    experts = draw.size()
    ids = draw.ids(experts, draw.size())
    ends = torch.bincount(ids, minlength=experts).cumsum(0).int()
    return [ends, ids.numel() + 1, 1]


def _routes_by_id(draw: Draw) -> Args:
    experts = draw.size()
    return [draw.ids(experts, draw.size()), experts, 1]


def _rows(draw: Draw) -> Args:
    ids, experts, ranks = _routes_by_id(draw)
    route: list[Tensor] = list(_ALONE.expert_routes_by_id(ids, experts, ranks))[:3]
    return [draw.numbers(ids.numel(), *draw.shape()), *route, ranks]


SAMPLES: dict[str, Sample] = {
    "sp_compiler::expert_routes": _routes,
    "sp_compiler::expert_routes_by_id": _routes_by_id,
    "sp_compiler::expert_dispatch": _rows,
    "sp_compiler::expert_combine": _rows,
}
