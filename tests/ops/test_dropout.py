"""Counter-based dropout: the same for every sharding and code path, and statistically fair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.check.derive import declared_strategies
from sp_compiler.ops import counter
from sp_compiler.ops import dropout as module
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.counter import call_seed
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of
from tests.helpers.statistics import assert_fair

SEED = torch.tensor(-4_611_686_018_427_387_847)
SHAPE = (4, 8, 12)


def dropout_mask(
    x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int, rank: int | Tensor
) -> Tensor:
    tp = Communicator(None, rank, world_size)
    return module.dropout_mask(tp, x, seed, p, site, dim, world_size)


def dropout(
    x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int, rank: int | Tensor
) -> Tensor:
    tp = Communicator(None, rank, world_size)
    return module.dropout(tp, x, seed, p, site, dim, world_size)


def _mask(
    shape: tuple[int, ...],
    p: float = 0.5,
    site: int = 0,
    seed: int | Tensor = SEED,
    dim: int = 0,
    world_size: int = 1,
    rank: int | Tensor = 0,
) -> Tensor:
    seed = torch.as_tensor(seed)
    return dropout_mask(torch.zeros(shape), seed, p, site, dim, world_size, rank)


def _gather(tensor: Any, world_size: int, dim: int) -> Tensor:
    """The parts of all simulated ranks, put together."""
    return torch.cat([tensor._local_tensors[rank] for rank in range(world_size)], dim)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shards_put_together_equal_the_whole(dtype: torch.dtype, dim: int, world_size: int) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = list(enumerate(x.chunk(world_size, dim)))
    masks = [dropout_mask(part, SEED, 0.3, 5, dim, world_size, rank) for rank, part in parts]
    values = [dropout(part, SEED, 0.3, 5, dim, world_size, rank) for rank, part in parts]
    mask = dropout_mask(x, SEED, 0.3, 5, 0, 1, 0)
    assert torch.equal(torch.cat(masks, dim), mask)
    assert torch.equal(torch.cat(values, dim), x * mask * (1 / 0.7))


@pytest.mark.parametrize(("dim", "padding"), [(0, 0), (1, 0), (1, 1), (3, 0)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_chunks_of_queries_put_together_equal_the_whole(
    dim: int, padding: int, world_size: int
) -> None:
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    for rank, part in enumerate(x.chunk(world_size, dim)):
        place = SEED, 0.3, 5, dim, world_size, 7, padding * (world_size - 1)
        tp = Communicator(None, rank, world_size)
        for draw in (module.dropout_mask, module.dropout):
            chunks = [
                draw(tp, part[:, :, first:end], *place, first, 6) for first, end in ((0, 4), (4, 6))
            ]
            assert torch.equal(torch.cat(chunks, 2), draw(tp, part, *place))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_simulated_ranks_get_the_bits_of_real_ones(dim: int, world_size: int) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    with LocalTensorMode(world_size):
        parts = LocalTensor({r: part.clone() for r, part in enumerate(x.chunk(world_size, dim))})
        rank = LocalTensor({r: torch.tensor(r) for r in range(world_size)})
        mask = dropout_mask(parts, SEED, 0.3, 5, dim, world_size, rank)
        value = dropout(parts, call_seed(SEED, 2), 0.3, 5, dim, world_size, rank)
    assert torch.equal(_gather(mask, world_size, dim), dropout_mask(x, SEED, 0.3, 5, dim, 1, 0))
    assert torch.equal(
        _gather(value, world_size, dim), dropout(x, call_seed(SEED, 2), 0.3, 5, dim, 1, 0)
    )


@pytest.mark.parametrize("block", [1, 5, 12, 30, 1 << 20])
@pytest.mark.parametrize("dim", [0, 2])
def test_blocks_do_not_show(block: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    rank = torch.tensor(3)
    mask = dropout_mask(x, SEED, 0.3, 5, dim, 4, rank)
    value = dropout(x, SEED, 0.3, 5, dim, 4, rank)
    monkeypatch.setattr(counter, "_CPU_BLOCK", block)
    assert torch.equal(dropout_mask(x, SEED, 0.3, 5, dim, 4, 3), mask)
    assert torch.equal(dropout(x, SEED, 0.3, 5, dim, 4, 3), value)


def test_rows_are_counted_over_all_leading_dims() -> None:
    """A value may be (b, s, h) on one device and flat rows (b * s, h) when sharded."""
    assert torch.equal(_mask((4, 8, 12)).flatten(0, 1), _mask((32, 12)))


@pytest.mark.parametrize("rank", [0, torch.tensor(0)])
def test_result_is_laid_out_like_the_input(rank: int | Tensor) -> None:
    x = torch.randn(6, 4, 5).transpose(0, 2)
    value = dropout(x, SEED, 0.5, 0, 0, 1, rank)
    mask = dropout_mask(x, SEED, 0.5, 0, 0, 1, rank)
    assert value.stride() == mask.stride() == x.stride()
    assert torch.equal(mask, _mask(tuple(x.shape)))
    assert torch.equal(value, x * mask * 2)


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,), (7,)])
def test_degenerate_shapes(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert torch.equal(dropout(x, SEED, 0.5, 0, 0, 1, 0), _mask(shape) * 2.0)


def test_input_that_requires_grad_is_left_alone() -> None:
    x = torch.nn.Parameter(torch.ones(8, 8))
    value = dropout(x, SEED, 0.5, 0, 0, 1, 0)
    assert not value.requires_grad
    assert torch.equal(x, torch.ones(8, 8))


def test_nothing_is_dropped_at_zero_and_anything_outside_is_refused() -> None:
    assert _mask((100, 100), p=0.0).all()
    for p in (-0.1, 1.0, 1.5, math.nan):
        with pytest.raises(ArgumentError, match="probability"):
            _mask((2, 2), p=p)
        with pytest.raises(ArgumentError, match="probability"):
            dropout(torch.zeros(2, 2), SEED, p, 0, 0, 1, 0)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9])
def test_drop_rate(p: float) -> None:
    dropped = ~_mask((512, 512), p=p)
    assert_fair(dropped.flatten(), p)
    if p >= 0.1:  # a row of rare drops is far from normal
        assert_fair(dropped, p)
        assert_fair(dropped.T, p)


def test_probability_resolution() -> None:
    thresholds = [module.threshold_of(k * 2.0**-32) for k in (0, 1, 2, 2**31, 2**32 - 1)]
    assert thresholds == [-(2**31), 1 - 2**31, 2 - 2**31, 0, 2**31 - 1]


def test_counts_in_windows_follow_the_binomial_distribution() -> None:
    """Chi-square of the drops in each run of 16 neighbours, along rows and along columns."""
    mask = _mask((1024, 1024))
    expected = torch.tensor([math.comb(16, k) for k in range(17)]).double() / 2**16
    for direction in (mask, mask.T):
        drops = direction.reshape(-1, 16).sum(-1)
        observed = torch.bincount(drops, minlength=17).double()
        wanted = expected * drops.numel()
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        assert statistic < 55  # 16 degrees of freedom: one in 300,000


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 2), (0, 64), (64, 0), (512, 512)])
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    mask = _mask((1024, 1024))
    assert_fair((mask ^ mask.roll(shift, (0, 1))).flatten())


def test_pairs_of_rows_and_pairs_of_columns_are_independent() -> None:
    signs = _mask((512, 512)).double() * 2 - 1
    for matrix in (signs, signs.T):
        correlation = matrix @ matrix.T / 512
        off_diagonal = correlation[~torch.eye(512, dtype=torch.bool)]
        assert off_diagonal.abs().max() < 6.5 / math.sqrt(512)
        # The sum of squares over all pairs sees weak structure that no single pair shows.
        assert abs(off_diagonal.square().mean() * 512 - 1) < 0.03


def test_sites_seeds_and_calls_are_independent() -> None:
    shape = (256, 256)
    masks = [_mask(shape, site=site) for site in (0, 1, 2)]
    masks += [_mask(shape, seed=seed) for seed in (0, 1, -1, 1 << 32, 1 << 63 - 1)]
    masks += [_mask(shape, seed=call_seed(SEED, call)) for call in (0, 1, 2)]
    for first in range(len(masks)):
        for second in range(first):
            assert_fair((masks[first] ^ masks[second]).flatten())


def test_shards_are_independent() -> None:
    masks = [_mask((128, 128), dim=0, world_size=4, rank=rank) for rank in range(4)]
    masks += [_mask((128, 128), dim=1, world_size=4, rank=rank) for rank in range(1, 4)]
    for first in range(len(masks)):
        for second in range(first):
            assert_fair((masks[first] ^ masks[second]).flatten())


@pytest.mark.parametrize("dim", [0, 1])
def test_positions_beyond_32_bits_count(dim: int) -> None:
    """Shards whose offsets differ by multiples of 2^32 rows or columns share nothing."""
    world_size = 1 << 40
    ranks = [0, 1 << 26, 1 << 27, (1 << 39) + (1 << 26)]  # times 64 rows or columns
    masks = [_mask((64, 64), dim=dim, world_size=world_size, rank=rank) for rank in ranks]
    for first in range(len(masks)):
        for second in range(first):
            assert_fair((masks[first] ^ masks[second]).flatten())


def test_wide_rows_agree_across_shardings() -> None:
    """Columns 2^33 to 2^33 + 128 of a very wide tensor, in shards of 64 and of 32."""
    whole = _mask((4, 64), dim=1, world_size=1 << 28, rank=1 << 27)
    halves = [_mask((4, 32), dim=1, world_size=1 << 29, rank=(1 << 28) + part) for part in (0, 1)]
    assert torch.equal(torch.cat(halves, 1), whole)


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 62])
def test_a_flipped_seed_bit_flips_half_of_the_mask(bit: int) -> None:
    assert_fair((_mask((256, 256)) ^ _mask((256, 256), seed=SEED ^ (1 << bit))).flatten())


# As operators.

_P, _SITE = 0.3, 5
_X = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_PLACED = [(R, R, 1), (P, P, 1), *[(S(dim), S(dim), 0) for dim in range(3)]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("operand", "result", "told"), _PLACED, ids=str)
def test_dropout_and_its_gradient(
    operand: Placement, result: Placement, told: int, world_size: int
) -> None:
    """``told``: number of ranks in the call; 0: all there are."""
    kept = dropout_mask(_X, SEED, _P, _SITE, 0, 1, 0).double() * (1 / (1 - _P))
    rest = (_P, _SITE, operand.dim, told or world_size)
    case = Case(module.DROPOUT, lambda x, seed: x * kept, [_X, SEED], rest, (operand, R), (result,))
    assert_right(case, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("operand", "result", "told"), [(R, R, 1), (P, R, 1), *_PLACED[2:]])
def test_mask_of_any_placement(
    operand: Placement, result: Placement, told: int, world_size: int
) -> None:
    """A partial sum has the mask of the sum, the same on every rank."""
    kept = dropout_mask(_X, SEED, _P, _SITE, 0, 1, 0)
    rest = (_P, _SITE, operand.dim, told or world_size)
    case = Case(
        module.DROPOUT_MASK, lambda x, seed: kept, [_X, SEED], rest, (operand, R), (result,)
    )
    assert_right(case, world_size)


def test_registered() -> None:
    x = _X.clone().requires_grad_()
    assert_registered(module.DROPOUT, x, SEED, _P, _SITE, 0, 1)
    assert_registered(module.DROPOUT_MASK, x, SEED, _P, _SITE, 0, 1)
    assert_registered(module.DROPOUT, x, SEED, _P, _SITE, 0, 1, 3)


@pytest.mark.parametrize(("placement", "told"), [("S(0)", 1), ("R", 2), ("S(1)", 2)])
def test_a_call_for_another_placement_is_not_declared(placement: str, told: int) -> None:
    """A shard as if replicated, a replicated value as a shard, a shard of another dim."""
    node = node_of(module.DROPOUT, [_X, SEED], (_P, _SITE, 0, told))
    ways = declared_strategies(node, 2) or ()
    assert Placement.parse(placement) not in [way.operands[0] for way in ways]
