"""Aligned columns of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"([\d.]+ (B|[KMGT]iB))?")


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Return aligned columns: sizes to the right, others to the left."""
    lines = [tuple(row) for row in rows]
    if not lines:
        return ""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Only a column in which every cell is a size; with any other word it is text.
    right = [all(map(_NUMBER.fullmatch, column)) for column in zip(*lines, strict=True)]
    texts = (
        "  ".join(
            cell.rjust(width) if is_size else cell.ljust(width)
            for cell, width, is_size in zip(line, widths, right, strict=True)
        )
        for line in lines
    )
    return "\n".join(f"{indent}{text}".rstrip() for text in texts)
