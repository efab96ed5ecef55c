"""Words for the letters of placements, wherever a user reads some."""

from __future__ import annotations

import re

_LETTERS = (
    (r"\bR\b", "R: the same on every rank, its gradient a sum over ranks"),
    (r"\bI\b", "I: the same on every rank, its gradient too"),
    (r"\bP\b", "P: every rank has a part of a sum"),
    (r"\bS\(\d+\)", "S(0): ranks divide dim 0"),
    (r"\bS\(\d+\|", "S(0|128,64): ranks divide each of the segments of 128 and 64 along dim 0"),
    (r"\bT\(\d+\)", "T(2): ranks divide the rows that the first 2 dims flatten to"),
)


def legend(text: str) -> str:
    """Return a line on every letter of a placement in ``text``, "" where there is none."""
    # In prose an R or an I may be anything: beside a sharded value it is a placement.
    if re.search(r"\b[ST]\(\d|\bto [RIP]\b|\b[RIP] to\b|-> [RIP]\b", text) is None:
        return ""
    return "\n".join(meaning for pattern, meaning in _LETTERS if re.search(pattern, text))
