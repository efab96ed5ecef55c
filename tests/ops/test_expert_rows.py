"""Rows that go to the ranks of their experts and back, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compiler.base.errors import RankMismatchError, UnsupportedError
from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.expert_rows import (
    EXPERT_COMBINE,
    EXPERT_DISPATCH,
    EXPERT_ROUTES,
    EXPERT_ROUTES_BY_ID,
)
from sp_compiler.ops.registry import Operator
from tests.helpers.expert_ranks import on_expert_ranks
from tests.helpers.own_operators import Case, assert_registered, assert_right

_ROWS, _EXPERTS = 7, 6


def _ids(rank: int, rows: int = _ROWS) -> Tensor:
    return torch.randint(_EXPERTS, (rows,), generator=torch.Generator().manual_seed(rank))


def _x(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(_ROWS, 3, dtype=torch.float64, generator=generator)


def _ends(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=_EXPERTS).cumsum(0).int()


def _by_end(tp: Any, rank: int, num_ranks: int) -> tuple[Any, Tensor]:
    """Rows sorted by expert; the last two have none."""
    ids = _ids(rank).sort().values[:-2]
    return tp.expert_routes(_ends(ids), _ROWS, num_ranks), torch.cat([ids, ids.new_full((2,), -1)])


def _by_id(tp: Any, rank: int, num_ranks: int) -> tuple[Any, Tensor]:
    ids = _ids(rank)
    return tp.expert_routes_by_id(ids, _EXPERTS, num_ranks), ids


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("routes", [_by_end, _by_id])
def test_rows_go_to_their_experts_and_back(routes: Any, num_ranks: int) -> None:
    num_local = _EXPERTS // num_ranks

    def run(tp: Any) -> tuple[Tensor, ...]:
        rank = tp.experts.rank
        (splits, order, places, experts, ends), ids = routes(tp, rank, num_ranks)
        # A row that knows its rank, its place and its expert.
        rows = torch.stack([torch.full_like(ids, rank), torch.arange(_ROWS), ids], 1)
        arrived = tp.expert_dispatch(rows, splits, order, places, num_ranks)
        total = int(ends[-1])
        assert arrived.shape[0] == _ROWS * num_ranks
        assert not arrived[total:].any()
        own = arrived[:total, 2] - rank * num_local
        assert torch.equal(own, experts[:total])
        assert (experts[total:] == -1).all()
        assert torch.equal(own, own.sort().values)
        assert torch.equal(ends.long(), torch.bincount(own, minlength=num_local).cumsum(0))
        back = tp.expert_combine(arrived, splits, order, places, num_ranks)
        assert torch.equal(back, torch.where(ids[:, None] >= 0, rows, 0))
        # Each is the other's transpose: <D x, y> = <x, C y>, summed over the ranks.
        x = _x(rank)
        sent = tp.expert_dispatch(x, splits, order, places, num_ranks)
        y = torch.randn(sent.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(rank))
        returned = tp.expert_combine(y, splits, order, places, num_ranks)
        return arrived[:total], (sent * y).sum(), (x * returned).sum()

    found = on_expert_ranks(num_ranks, run)
    rows = torch.cat([each[0] for each in found])
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)
    left_out = 2 * (routes is _by_end)
    assert len(rows) == num_ranks * (_ROWS - left_out)
    torch.testing.assert_close(sum(each[1] for each in found), sum(each[2] for each in found))


def test_batches_of_different_sizes_are_refused_on_every_rank() -> None:
    def run(tp: Any) -> str:
        with pytest.raises(RankMismatchError, match=r"rows for experts: \[7, 8\]") as error:
            tp.expert_routes_by_id(_ids(0, 7 + tp.experts.rank), _EXPERTS, 2)
        return str(error.value)

    assert len(on_expert_ranks(2, run)) == 2


@pytest.mark.parametrize("wrong", [-1, _EXPERTS])
def test_an_expert_that_does_not_exist_is_refused_on_every_rank(wrong: int) -> None:
    def run(tp: Any) -> str:
        ids = _ids(0).index_fill(0, torch.tensor(2), wrong if tp.experts.rank == 1 else 0)
        with pytest.raises(IndexError, match=r"ranks \[1\] along .* not one of the 6") as error:
            tp.expert_routes_by_id(ids, _EXPERTS, 2)
        return str(error.value)

    assert len(on_expert_ranks(2, run)) == 2


def test_another_number_of_ranks_is_refused() -> None:
    tp: Any = Communicator(None, 0, 1)
    with pytest.raises(UnsupportedError, match="over 2 ranks, and runs on 1"):
        tp.expert_routes_by_id(_ids(0), _EXPERTS, 2)


def _route() -> tuple[Tensor, Tensor, Tensor]:
    tp: Any = Communicator(None, 0, 1)
    splits, order, places, _, _ = tp.expert_routes_by_id(_ids(0), _EXPERTS, 1)
    return splits, order, places


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("placement", [R, P, S(1)], ids=str)
def test_every_rank_of_tp_moves_its_part_of_a_row(placement: Placement, world_size: int) -> None:
    splits, order, places = _route()
    x = torch.randn(_ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    placements = (placement, R, R, R)
    sort = Case(
        EXPERT_DISPATCH, lambda x, *_: x[order], [x, splits, order, places], (1,), placements,
        (placement,),
    )  # fmt: skip
    assert_right(sort, world_size)
    back = Case(
        EXPERT_COMBINE, lambda y, *_: torch.zeros_like(y).index_copy(0, order, y),
        [x, splits, order, places], (1,), placements, (placement,),
    )  # fmt: skip
    assert_right(back, world_size)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (EXPERT_ROUTES, (_ends(_ids(0)), _ROWS, 1)),
        (EXPERT_ROUTES_BY_ID, (_ids(0), _EXPERTS, 1)),
        (EXPERT_DISPATCH, (_x(0).requires_grad_(), *_route(), 1)),
        (EXPERT_COMBINE, (_x(0).requires_grad_(), *_route(), 1)),
    ],
)
def test_registered(operator: Operator, args: tuple[Any, ...]) -> None:
    assert_registered(operator, *args)
