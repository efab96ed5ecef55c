"""Ids of a lookup, or of a loss, on a device: checked without making the device unusable.

A lookup of a wrong id ends with an assertion on the device, after which the process can no longer
use it. So the lookup is given ids that are always in range, and the host is told about wrong ones
(:mod:`sp_compiler.ops.gpu.id_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu.id_checks import IdBounds
from sp_compiler.ops.registry import Arguments, Operator, Typing, register
from sp_compiler.ops.vocabulary import is_on_host, require_inside


def checked_ids(
    tp: Communicator, ids: Tensor, size: int, ignored: int | None, what: str, world_size: int
) -> Tensor:
    """Return integer ``ids`` with the nearest of ``range(size)`` in place of those outside of it.

    The next call reports which was outside; on the host this one does. ``ignored``: an id that
    stays as it is; ``what``: as for :class:`~sp_compiler.ops.gpu.id_checks.IdBounds`. Each rank
    checks the ids that it has; ``world_size``, 1 in a captured model, has no effect.

    Raises:
        IndexError: an id on the host is outside.
    """
    is_ignored = None if ignored is None else ids == ignored
    looked_up = ids if is_ignored is None else ids.masked_fill(is_ignored, 0)
    require_inside(tp, looked_up, size, what)
    # Ids of simulated ranks are those of one rank, which were checked.
    is_told_later = isinstance(tp.rank, int) and not is_on_host(ids)
    if is_told_later and tp.id_checks.wanted and ids.numel():
        bounds = torch.stack(looked_up.aminmax()).long()
        tp.id_checks.note(IdBounds(bounds, size, what))
    inside = looked_up.clamp(0, size - 1)
    return inside if is_ignored is None else torch.where(is_ignored, ids, inside)


def _fake(ids: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(ids)


def _typings(args: Arguments, world_size: int) -> Sequence[Typing]:
    cuts = [S(dim) for dim in range(args["ids"].meta["val"].dim())]
    return [((each,), (each,)) for each in (R, *cuts)]


CHECKED_IDS = register(
    Operator(
        name="checked_ids",
        schema="(Tensor ids, SymInt size, SymInt? ignored, str what, SymInt world_size) -> Tensor",
        kernel=checked_ids,
        fake=_fake,
        typings=_typings,
        checks_numbers=True,
    )
)
