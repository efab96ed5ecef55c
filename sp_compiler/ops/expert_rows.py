"""Rows of tokens on their way to the ranks that have their experts, and back.

Experts are divided over the axis "ep", whose ranks have different batches. A row goes to the rank
of its expert (:data:`EXPERT_DISPATCH`), and the expert's result back to the row's place
(:data:`EXPERT_COMBINE`), each by one all-to-all of only the rows that have an expert::

    rows of this rank        (rows, h)   by place
      -- dispatch -->        (room, h)   by expert of this rank; zeros after the last row
      -- combine -->         (rows, h)   by place; zeros for a row that has no expert

Both are the same partial permutation of the rows of all ranks, read in the two directions, so each
is the gradient of the other. All rows may belong to experts of one rank: ``room`` is the number of
rows of all ranks. The two routing operators compute once, for all dispatches of a layer, where each
row goes; for that, ranks exchange the numbers of rows per expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.errors import RankMismatchError, UnsupportedError
from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import (
    Arguments,
    Collective,
    Gradient,
    Operator,
    Typing,
    register,
)

_sp = torch.ops.sp_compiler
_Routes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
ALL_TO_ALL = "all_to_all"


def expert_routes(tp: Communicator, ends: Tensor, rows: int, world_size: int) -> _Routes:
    """Return the routes of rows that are sorted by expert.

    Args:
        tp: the communicator.
        ends: for each expert of all ranks the number of rows up to its last one; rows after those
            of the last expert have none.
        rows: number of rows, the same on all ranks.
        world_size: number of ranks that divide the experts, not of the group "tp".

    Returns:
        ``splits``: on the CPU, numbers of rows sent to each rank and received from each.
        ``order``: the rows in the order in which they are sent; empty if they are in it already.
        ``places``: for each row that arrives, its place if they are sorted by expert of this rank.
        ``experts``: for each of these places the number of the expert among this rank's; -1 after
        the last row.
        ``ends``: as the argument, for the experts of this rank.

    Raises:
        UnsupportedError: experts are divided over another number of ranks.
        RankMismatchError: a rank has another number of rows.
    """
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    return _routes(tp, counts, ends.new_empty(0).long(), rows, world_size, ends[-1] > rows)


def expert_routes_by_id(
    tp: Communicator, ids: Tensor, num_experts: int, world_size: int
) -> _Routes:
    """Return the routes, as :func:`expert_routes`, of rows whose experts are ``ids``.

    Raises:
        IndexError: on all ranks, if one has an expert that does not exist.
    """
    # Stable: rows of one expert stay in their order, and sums over them are the same in every run.
    order = torch.argsort(ids, stable=True)
    known = ids.clamp(0, num_experts - 1)
    counts = torch.bincount(known, minlength=num_experts)
    return _routes(tp, counts, order, ids.shape[0], world_size, (known != ids).any())


def _routes(
    tp: Communicator, counts: Tensor, order: Tensor, rows: int, world_size: int, is_wrong: Tensor
) -> _Routes:
    num_local = counts.shape[0] // world_size
    by_rank = counts.view(world_size, num_local)
    # With the counts each rank sends its number of rows, which must be the same on all, or -1 if
    # it cannot go on, because the others would wait for its rows.
    size = torch.where(is_wrong, -1, rows).to(by_rank)
    outgoing = torch.cat([by_rank, size.expand(world_size, 1)], 1)
    incoming = _exchange(tp, outgoing, [1] * world_size, [1] * world_size)
    received = incoming[:, :-1]
    # The only wait of the host: both directions, forward and backward, use these numbers.
    splits = torch.stack([by_rank.sum(1), received.sum(1), incoming[:, -1]]).cpu()
    sizes = splits[2].tolist()
    if wrong := [rank for rank, size in enumerate(sizes) if size < 0]:
        raise IndexError(
            f'ranks {wrong} along the axis "ep" have rows with an expert that is not one of the '
            f"{counts.shape[0]}"
        )
    if any(size != rows for size in sizes):
        raise RankMismatchError(
            f'ranks along the axis "ep" have different numbers of rows for experts: {sizes}. They '
            "exchange rows, so their batches must have equal sizes; pad them, or drop the last one"
        )
    total = int(splits[1].sum())
    # Rows arrive by rank and then by expert; experts need them by expert and then by rank.
    lengths, wanted = received.flatten(), received.t().flatten()
    starts = (wanted.cumsum(0) - wanted).view(num_local, world_size).t().flatten()
    before = lengths.cumsum(0) - lengths
    places = counts.new_zeros(rows * world_size)
    places[:total] = torch.arange(total, device=counts.device) + torch.repeat_interleave(
        starts - before, lengths, output_size=total
    )
    experts = counts.new_full((rows * world_size,), -1)
    own = received.sum(0)
    numbers = torch.arange(num_local, device=counts.device)
    experts[:total] = torch.repeat_interleave(numbers, own, output_size=total)
    return splits[:2], order, places, experts, own.cumsum(0).int()


def expert_dispatch(
    tp: Communicator, x: Tensor, splits: Tensor, order: Tensor, places: Tensor, world_size: int
) -> Tensor:
    """Return the rows of all ranks that belong to this rank's experts, by expert."""
    sent, received = splits.tolist()
    # Rows without an expert are the last ones, and stay here.
    x = x[order] if order.numel() else x[: sum(sent)]
    arrived = _exchange(tp, x.contiguous(), sent, received)
    result = x.new_zeros(places.shape[0], *x.shape[1:])
    return result.index_copy_(0, places[: arrived.shape[0]], arrived)


def expert_combine(
    tp: Communicator,
    y: Tensor,
    splits: Tensor,
    order: Tensor,
    places: Tensor,
    world_size: int,
) -> Tensor:
    """Return to each rank the results of its rows, in its own order."""
    sent, received = splits.tolist()
    total = sum(received)
    back = _exchange(tp, y[places[:total]], received, sent)
    rows = places.shape[0] // world_size
    result = y.new_zeros(rows, *y.shape[1:])
    if order.numel():
        return result.index_copy_(0, order, back)
    result[: back.shape[0]] = back
    return result


def _exchange(
    tp: Communicator, rows: Tensor, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    ranks = tp.experts
    num_ranks = 1 if ranks is None else ranks.world_size
    if num_ranks != len(sent):
        raise UnsupportedError(
            f"the program divides experts over {len(sent)} ranks, and runs on {num_ranks}: give "
            'the mesh an axis "ep" of this size'
        )
    return rows if ranks is None else ranks.exchange(rows, sent, received)


def _fake_routes(ends: Tensor, rows: int, world_size: int) -> _Routes:
    return _fake(ends, ends.shape[0], 0, rows, world_size)


def _fake_routes_by_id(ids: Tensor, num_experts: int, world_size: int) -> _Routes:
    return _fake(ids, num_experts, ids.shape[0], ids.shape[0], world_size)


def _fake(like: Tensor, num_experts: int, ordered: int, rows: int, world_size: int) -> _Routes:
    def numbers(*shape: int, device: Any = None, dtype: torch.dtype = torch.int64) -> Tensor:
        return like.new_empty(shape, dtype=dtype, device=device or like.device)

    return (
        numbers(2, world_size, device="cpu"),
        numbers(ordered),
        numbers(rows * world_size),
        numbers(rows * world_size),
        numbers(num_experts // world_size, dtype=torch.int32),
    )


def _fake_dispatch(
    x: Tensor, splits: Tensor, order: Tensor, places: Tensor, world_size: int
) -> Tensor:
    return x.new_empty((places.shape[0], *x.shape[1:]))


def _fake_combine(
    y: Tensor, splits: Tensor, order: Tensor, places: Tensor, world_size: int
) -> Tensor:
    return y.new_empty((places.shape[0] // world_size, *y.shape[1:]))


def _typings_of_routes(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((R,), (R,) * 5)]


def _typings_of_rows(args: Arguments, world_size: int) -> Sequence[Typing]:
    """Rows move unchanged; summands move in the same way on all ranks, and so does their sum."""
    rows: Node = next(iter(args.values()))
    placements: list[Placement] = [R, P, *map(S, range(1, rows.meta["val"].dim()))]
    return [((where, R, R, R), (where,)) for where in placements]


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, splits, order, places, *ctx.numbers = inputs
    ctx.save_for_backward(splits, order, places)


def _backward_of_dispatch(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _sp.expert_combine(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 4


def _backward_of_combine(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _sp.expert_dispatch(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 4


def _of_routes(args: Arguments, result: Any) -> Sequence[Collective]:
    return [Collective(ALL_TO_ALL, 1, result[0].numel() * result[0].element_size())]


def _of_rows(args: Arguments, result: Tensor) -> Sequence[Collective]:
    """What a rank sends if experts get the same number of rows."""
    rows = args["places"].meta["val"].shape[0] // args["world_size"]
    row_bytes = result.element_size() * math.prod(result.shape[1:])
    return [Collective(ALL_TO_ALL, 1, rows * row_bytes)]


def _scratch_bytes(args: Arguments, result: Tensor) -> int:
    """Rows in the order in which they are sent, and as they arrive."""
    return 2 * _of_rows(args, result)[0].num_bytes


_ROUTE_NAMES = ("splits", "order", "places", "experts", "ends")
_ROWS = "Tensor splits, Tensor order, Tensor places, SymInt world_size"

EXPERT_ROUTES = register(
    Operator(
        name="expert_routes",
        schema="(Tensor ends, SymInt rows, SymInt world_size) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        kernel=expert_routes,
        fake=_fake_routes,
        typings=_typings_of_routes,
        result_names=_ROUTE_NAMES,
        collectives=_of_routes,
        checks_numbers=True,
    )
)
EXPERT_ROUTES_BY_ID = register(
    Operator(
        name="expert_routes_by_id",
        schema="(Tensor ids, SymInt num_experts, SymInt world_size) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        kernel=expert_routes_by_id,
        fake=_fake_routes_by_id,
        typings=_typings_of_routes,
        result_names=_ROUTE_NAMES,
        collectives=_of_routes,
        checks_numbers=True,
    )
)
EXPERT_DISPATCH = register(
    Operator(
        name="expert_dispatch",
        schema=f"(Tensor x, {_ROWS}) -> Tensor",
        kernel=expert_dispatch,
        fake=_fake_dispatch,
        typings=_typings_of_rows,
        gradient=Gradient(_save_route, _backward_of_dispatch),
        collectives=_of_rows,
        scratch_bytes=_scratch_bytes,
    )
)
EXPERT_COMBINE = register(
    Operator(
        name="expert_combine",
        schema=f"(Tensor y, {_ROWS}) -> Tensor",
        kernel=expert_combine,
        fake=_fake_combine,
        typings=_typings_of_rows,
        gradient=Gradient(_save_route, _backward_of_combine),
        collectives=_of_rows,
        scratch_bytes=_scratch_bytes,
    )
)
