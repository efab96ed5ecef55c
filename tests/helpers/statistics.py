"""Statistical tests of random numbers, with bounds that a fair sample misses about never."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

_P_VALUE = 1e-6


def assert_fair(sample: Tensor, p: float = 0.5) -> None:
    """Each row of ``sample`` (of booleans or bits) is true with frequency ``p``, within 6 sigma."""
    count, total = sample.sum(-1).double(), sample.shape[-1]
    sigma = math.sqrt(p * (1 - p) / total)
    assert ((count / total - p).abs() < 6 * sigma).all()


def assert_distributed(sample: Tensor, distribution: Callable[[Any], Any]) -> None:
    """The elements follow the distribution function, by the test of Kolmogorov and Smirnov."""
    assert stats.kstest(sample.flatten().double().numpy(), distribution).pvalue > _P_VALUE


def assert_counts(sample: Tensor, probabilities: Any) -> None:
    """The integers 0, 1, ... occur with these probabilities, by the chi-square test."""
    expected = np.asarray(probabilities, dtype=float)
    counts = np.bincount(sample.flatten().long().numpy(), minlength=len(expected))
    assert len(counts) == len(expected)
    # A class that cannot occur has no place in the statistic.
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) > 1:
        result = stats.chisquare(counts, expected / expected.sum() * counts.sum())
        assert result.pvalue > _P_VALUE


def assert_independent(first: Tensor, second: Tensor) -> None:
    """The elements of two samples are uncorrelated, within 6 sigma."""
    size = first.numel()
    correlation = np.corrcoef(first.flatten().double().numpy(), second.flatten().double().numpy())
    assert abs(float(correlation[0, 1])) < 6 / math.sqrt(size)
