"""Operators that combine several results in one tensor, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def _type_alike(args: Arguments, world_size: int) -> Sequence[Typing]:
    """The total and what is put into it have the same placement."""
    # Not along the written dim, where a rank would need to know where its own part begins.
    dims = [dim for dim in range(args["total"].meta["val"].dim()) if dim != args.get("dim")]
    return [((kind, kind), (kind,)) for kind in (R, P, *map(S, dims))]


def _type_product(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Return the product's placements; a sum of equally placed values keeps their placement."""
    return [
        ((R, R, R), (R,)),
        ((S(0), S(0), R), (S(0),)),
        ((S(1), R, S(1)), (S(1),)),
        ((P, S(1), S(0)), (P,)),
        ((P, P, R), (P,)),
        ((P, R, P), (P,)),
    ]


def _in_place(
    kernel: Callable[..., Tensor],
    operands: str,
    typings: Callable[[Arguments, int], Sequence[Typing]],
) -> Operator:
    """Register an operator that writes ``operands`` into a tensor, named after its kernel."""
    return register(
        Operator(
            name=kernel.__name__,
            schema=f"(Tensor total, {operands}, SymInt world_size) -> Tensor",
            kernel=kernel,
            fake=_fake_total,
            typings=typings,
            view="all",
            writes=True,
        )
    )


WRITE_ROWS = _in_place(write_rows, "Tensor part, int dim, SymInt start", _type_alike)
ADD_PRODUCT = _in_place(add_product, "Tensor left, Tensor right", _type_product)
ADD_PART = _in_place(add_part, "Tensor part", _type_alike)
