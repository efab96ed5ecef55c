"""The counter-based generator: its bits, and the seeds of forwards and calls."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compiler.ops.counter import Grid, call_seed, call_seeds, draw_seed
from tests.helpers.statistics import assert_fair

SEED = torch.tensor(-4_611_686_018_427_387_847)


def _bits(shape: tuple[int, ...], seed: int | Tensor = SEED) -> Tensor:
    return Grid(shape, torch.device("cpu"), torch.as_tensor(seed), 0, 0, 1, 0).hash_all()


def test_every_bit_of_the_hash_is_fair() -> None:
    bits = (_bits((256, 256)).flatten() >> torch.arange(32).unsqueeze(1)) & 1
    assert_fair(bits)


def test_numbers_of_a_long_row_are_uncorrelated_at_every_distance() -> None:
    """One product fewer in the hash fails at distances of some thousand columns."""
    length, lags = 1 << 20, 4096
    signs = 1.0 - 2.0 * (_bits((4, length)) < 0).double()
    spectrum = torch.fft.rfft(signs, 2 * length)
    sums = torch.fft.irfft(spectrum * spectrum.conj(), 2 * length)[:, 1:lags]
    assert (sums.abs() < 6 * length**0.5).all()


def test_call_seeds_are_distinct_and_well_mixed() -> None:
    seeds = [int(call_seed(torch.tensor(seed), call)) for seed in range(64) for call in range(64)]
    assert len(set(seeds)) == len(seeds)
    result = call_seed(SEED, 7)
    assert result.shape == ()
    assert result.dtype == torch.int64
    bits = (torch.tensor(seeds) >> torch.arange(64).unsqueeze(1)) & 1
    assert_fair(bits)


def test_seeds_of_several_calls_are_those_of_each() -> None:
    seeds = call_seeds(SEED, [-2, 0, 5])
    assert list(seeds) == [-2, 0, 5]
    for index, seed in seeds.items():
        assert torch.equal(seed, call_seed(SEED, index))
        assert seed.shape == ()
        assert seed.untyped_storage().nbytes() == 8
    assert call_seeds(SEED, []) == {}


def test_drawn_seeds_follow_the_default_generator() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = draw_seed(), draw_seed()
        torch.manual_seed(3)
        assert torch.equal(draw_seed(), first)
    assert first.shape == ()
    assert first.dtype == torch.int64
    assert not torch.equal(first, second)


def test_the_stream_is_pinned() -> None:
    """A change of these numbers breaks resumed training runs: state it in the changelog."""
    assert _bits((2, 3), seed=0).tolist() == [
        [1340989452, 1475998631, 1265238162],
        [1477320772, 1411433521, -2134502628],
    ]
    assert int(call_seed(torch.tensor(0), 0)) == -6411193824288604561
