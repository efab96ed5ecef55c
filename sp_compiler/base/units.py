"""Sizes of memory and times, as arguments and as text."""

from __future__ import annotations

import math
import re

from sp_compiler.base.errors import ArgumentError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
"""Powers of 1024."""

_TEXT = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?([A-Za-z]+)")


def parse_bytes(name: str, size: object) -> int:
    """Return the number of bytes of ``size``, an int or text such as ``"12GiB"``.

    Args:
        name: name of the argument, for errors.

    Raises:
        ArgumentError: ``size`` is anything else, or less than one byte.
    """
    num_bytes: object = size
    advice = ""
    if isinstance(size, str) and (match := _TEXT.fullmatch(size.strip())):
        number, unit = match.groups()
        num_bytes = int(float(number) * 1024 ** UNITS.index(unit)) if unit in UNITS else None
        advice = _unit_advice(number, unit)
    # A bool is an int in Python: ``memory_budget=True`` would be one byte.
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
        # Text of only digits may be meant in any unit.
        form = "with a unit" if isinstance(size, str) else "of bytes as an int, or text"
        raise ArgumentError(
            f"{name}={size!r}: expected a positive number {form}, such as "
            f'"12GiB" or "1.5 TiB" with one of {", ".join(UNITS)}{advice}'
        )
    return num_bytes


def check_seconds(name: str, seconds: object) -> None:
    """Raise ``ArgumentError`` unless ``seconds``, of the argument ``name``, is a finite time."""
    # By type, because a bool is an int in Python; NaN fails the comparison.
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:  # type: ignore[operator]
        raise ArgumentError(f"{name}={seconds!r}: expected a positive number of seconds")


def _unit_advice(number: str, unit: str) -> str:
    """Return a suggestion for an unknown unit."""
    # Not accepted, since "Gib" may mean gibibits, an eighth of a GiB.
    meant = [each for each in UNITS if each.lower() == unit.lower() and each != unit]
    if meant:
        return f'; did you mean "{number}{meant[0]}"?'
    # "80GB" means 80 GiB to some and 74.5 GiB to others, enough to run out of memory.
    is_decimal = re.fullmatch("[KMGT]B?", unit, re.IGNORECASE)
    prefix = unit[0].upper()
    return f" (1 {prefix}iB is 1024-based; {unit} could mean either)" if is_decimal else ""


def bytes_text(num_bytes: float) -> str:
    """Return a size as text, such as "1.50 GiB"."""
    unit = 0
    while num_bytes >= 1024 and unit < len(UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.2f} {UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def time_text(time_us: float) -> str:
    """Return a time as text, such as "3.2 us", "617.0 ms" or "73.8 s"."""
    for unit, size_us in (("s", 1e6), ("ms", 1e3)):
        if abs(time_us) >= size_us:
            return f"{time_us / size_us:.1f} {unit}"
    # + 0.0, so that -0.04 is not shown as -0.0.
    return f"{round(time_us, 1) + 0.0:.1f} us"
