"""Sizes of memory as a user writes them."""

from __future__ import annotations

from typing import Any

import pytest

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import parse_bytes
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
