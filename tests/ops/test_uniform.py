"""Uniform numbers: the same for every sharding and code path, exact, and statistically fair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from sp_compiler.base.placement import Placement, R, S
from sp_compiler.check.derive import declared_strategies
from sp_compiler.ops import counter
from sp_compiler.ops import uniform as module
from sp_compiler.ops.communicator import Communicator
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of
from tests.helpers.statistics import assert_distributed, assert_independent

SEED = torch.tensor(-4_611_686_018_427_387_847)
SHAPE = (4, 8, 12)
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_TYPES = pytest.mark.parametrize("dtype", _DIGITS)


def uniform(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    site: int = 0,
    seed: Tensor = SEED,
    dim: int = 0,
    world_size: int = 1,
    rank: Any = 0,
) -> Tensor:
    tp = Communicator(None, rank, world_size)
    return module.uniform(tp, seed, shape, dtype, site, dim, world_size)


def _part(shape: tuple[int, ...], dim: int, world_size: int) -> tuple[int, ...]:
    return tuple(size // world_size if d == dim else size for d, size in enumerate(shape))


@_TYPES
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_put_together_equal_the_whole(dtype: torch.dtype, dim: int, world_size: int) -> None:
    part = _part(SHAPE, dim, world_size)
    ranks = range(world_size)
    parts = [uniform(part, dtype, 5, SEED, dim, world_size, rank) for rank in ranks]
    assert torch.equal(torch.cat(parts, dim), uniform(SHAPE, dtype, 5))


@_TYPES
def test_simulated_ranks_get_the_numbers_of_real_ones(dtype: torch.dtype) -> None:
    with LocalTensorMode(2):
        rank = LocalTensor({r: torch.tensor(r) for r in range(2)})
        found = uniform(_part(SHAPE, 1, 2), dtype, 5, SEED, 1, 2, rank)
    assert isinstance(found, LocalTensor)
    parts = [found._local_tensors[rank] for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), uniform(SHAPE, dtype, 5))


@_TYPES
@pytest.mark.parametrize("block", [1, 5, 30])
def test_blocks_do_not_show(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uniform(SHAPE, dtype)
    monkeypatch.setattr(counter, "_CPU_BLOCK", block)
    assert torch.equal(uniform(SHAPE, dtype), expected)


def test_rows_are_counted_over_all_leading_dims() -> None:
    assert torch.equal(uniform((4, 8, 12)).flatten(0, 1), uniform((32, 12)))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,), (7,)])
def test_degenerate_shapes(shape: tuple[int, ...]) -> None:
    assert uniform(shape).shape == shape


@_TYPES
def test_odd_multiples_of_the_last_digit(dtype: torch.dtype) -> None:
    """Never 0 or 1, and every digit but the last is as often 0 as 1."""
    scaled = (uniform((512, 512), dtype).double() * 2.0 ** _DIGITS[dtype]).long()
    assert (scaled & 1).all()
    assert int(scaled.min()) > 0
    assert int(scaled.max()) < 1 << _DIGITS[dtype]
    for digit in range(1, _DIGITS[dtype]):
        share = float(((scaled >> digit) & 1).double().mean())
        assert abs(share - 0.5) < 6 * 0.5 / 512


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_even_distribution(dtype: torch.dtype) -> None:
    numbers = uniform((512, 512), dtype).double()
    assert_distributed(numbers, lambda u: u)
    for shift in ((0, 1), (1, 0), (1, 1), (64, 0), (0, 256)):
        assert_independent(numbers, numbers.roll(shift, (0, 1)))


def test_sites_seeds_and_shards_are_independent() -> None:
    shape = (256, 256)
    samples = [uniform(shape, site=site) for site in (0, 1, 2)]
    samples += [uniform(shape, seed=SEED + shift) for shift in (1, 1 << 32)]
    samples += [uniform(shape, dim=dim, world_size=4, rank=2) for dim in (0, 1)]
    # The second hash of a double is no other site's, and not the first one again.
    samples.append(uniform(shape, torch.float64) * 2**26 % 1)
    for number, first in enumerate(samples):
        for second in samples[:number]:
            assert_independent(first, second)


def test_the_stream_is_pinned() -> None:
    """A change of these numbers breaks resumed training runs: state it in the changelog."""
    numbers = [float(uniform((1,), dtype, seed=torch.tensor(0))) for dtype in _DIGITS]
    assert numbers == [0.312223439453022, 0.31222349405288696, 0.31201171875, 0.30859375]


# As an operator.

_PLACED = [(R, 1), *[(S(dim), 0) for dim in range(3)]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("result", "told"), _PLACED, ids=str)
def test_every_placement(result: Placement, told: int, world_size: int) -> None:
    """``told``: number of ranks in the call; 0: all there are."""
    numbers = uniform(SHAPE, torch.float64, 5)
    size = SHAPE if result == R else _part(SHAPE, result.dim, world_size)
    rest = (list(size), torch.float64, 5, result.dim, told or world_size)
    case = Case(module.UNIFORM, lambda seed: numbers, [SEED], rest, (R,), (result,))
    assert_right(case, world_size)


def test_registered() -> None:
    assert_registered(module.UNIFORM, SEED, list(SHAPE), torch.float32, 5, 0, 1)


@pytest.mark.parametrize(("placement", "told"), [("S(0)", 1), ("R", 2), ("S(1)", 2)])
def test_a_call_for_another_placement_is_not_declared(placement: str, told: int) -> None:
    """A shard as if replicated, a replicated value as a shard, a shard of another dim."""
    node = node_of(module.UNIFORM, [SEED], ([4, 8], torch.float32, 5, 0, told))
    ways = declared_strategies(node, 2) or ()
    assert Placement.parse(placement) not in [way.results[0] for way in ways]
