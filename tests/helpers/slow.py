"""Cases of parametrized tests that are among the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of ``values`` that is a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(fast: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Return the cases ``every``, of one value each, of which all but those in ``fast`` are slow
    tests."""
    fast = list(fast)
    return [value if value in fast else slow(value) for value in every]
