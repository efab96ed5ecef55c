"""The memory behind a tensor, as plain data: the unit of liveness and of the memory solvers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """Memory allocated by a call: ``owner`` is ("forward" or "backward", call index, name)."""

    owner: tuple[str, int, str]
    num_bytes: int
