"""Operators that put several results together in one tensor, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import P, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Arguments, Operator, Typing, register


def write_rows(tp: Communicator, total: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    """Write ``part`` into ``total`` from index ``start`` of ``dim`` on, in place; return
    ``total``."""
    total.narrow(dim, start, part.shape[dim]).copy_(part)
    return total


def add_product(tp: Communicator, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` to ``total`` in place, without memory for the product; return
    ``total``."""
    return total.addmm_(left, right)


def add_part(tp: Communicator, total: Tensor, part: Tensor) -> Tensor:
    """Add ``part`` to ``total`` in place; return ``total``."""
    return total.add_(part)


def _fake_total(total: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(total)


def _type_write(args: Arguments, world_size: int) -> Sequence[Typing]:
    total = args["total"].meta["val"].dim()
    # Along the dim that is written a rank would need to know where its own part begins.
    shards = [S(dim) for dim in range(total) if dim != args["dim"]]
    return [((kind, kind), (kind,)) for kind in (R, P, *shards)]


def _type_product(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Return the product's placements; a sum of equally placed values is placed as they are."""
    return [
        ((R, R, R), (R,)),
        ((S(0), S(0), R), (S(0),)),
        ((S(1), R, S(1)), (S(1),)),
        ((P, S(1), S(0)), (P,)),
        ((P, P, R), (P,)),
        ((P, R, P), (P,)),
    ]


def _type_part(args: Arguments, world_size: int) -> Sequence[Typing]:
    shards = map(S, range(args["total"].meta["val"].dim()))
    return [((kind, kind), (kind,)) for kind in (R, P, *shards)]


WRITE_ROWS = register(
    Operator(
        name="write_rows",
        schema="(Tensor total, Tensor part, int dim, SymInt start, SymInt world_size) -> Tensor",
        kernel=write_rows,
        fake=_fake_total,
        typings=_type_write,
        view="all",
        writes=True,
    )
)
ADD_PRODUCT = register(
    Operator(
        name="add_product",
        schema="(Tensor total, Tensor left, Tensor right, SymInt world_size) -> Tensor",
        kernel=add_product,
        fake=_fake_total,
        typings=_type_product,
        view="all",
        writes=True,
    )
)
ADD_PART = register(
    Operator(
        name="add_part",
        schema="(Tensor total, Tensor part, SymInt world_size) -> Tensor",
        kernel=add_part,
        fake=_fake_total,
        typings=_type_part,
        view="all",
        writes=True,
    )
)
