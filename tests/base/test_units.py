"""Sizes of memory as a user writes them."""

from __future__ import annotations

from typing import Any

import pytest

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import parse_bytes, time_text
from sp_compiler.options import CompileOptions


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (5, 5),
        ("7B", 7),
        ("1KiB", 1024),
        ("1.5 GiB", 3 << 29),
        (" 12GiB ", 12 << 30),
        (".5TiB", 1 << 39),
    ],
)
def test_sizes(size: int | str, num_bytes: int) -> None:
    assert parse_bytes("memory_budget", size) == num_bytes


@pytest.mark.parametrize(
    "size",
    [
        "12 GB",
        "12",
        "GiB",
        "12gib",
        "-1GiB",
        "0GiB",
        "1e3GiB",
        "12 GiB/s",
        "",
        0,
        -1,
        True,
        1.5,
        b"1B",
    ],
)
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r'memory_budget=.*expected a positive number.*"12GiB"'):
        CompileOptions(recompute="auto", memory_budget=size)


@pytest.mark.parametrize(
    ("size", "advice"),
    [
        ("80Gib", '; did you mean "80GiB"?'),
        ("1.5 kib", '; did you mean "1.5KiB"?'),
        ("80GB", " (1 GiB is 1024-based; GB could mean either)"),
        ("80g", " (1 GiB is 1024-based; g could mean either)"),
        ("80 hours", "TiB"),
    ],
)
def test_what_a_unit_may_have_meant(size: str, advice: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_bytes("memory", size)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0, "0.0 us"), (-0.04, "0.0 us"), (3.24, "3.2 us"), (617e3, "617.0 ms"), (-2e6, "-2.0 s")],
)
def test_times_have_a_unit_that_fits(time_us: float, text: str) -> None:
    assert time_text(time_us) == text
