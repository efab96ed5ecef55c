"""The memory behind a tensor, as plain data: what liveness and the memory solvers count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """Memory that a call made: ``owner`` is ("forward" or "backward", call index, name)."""

    owner: tuple[str, int, str]
    num_bytes: int
