"""The logger of the package, and what ``SP_COMPILER_LOG`` asks of it."""

from __future__ import annotations

import logging
import os
import sys

from sp_compiler.base.errors import ArgumentError

LOG = logging.getLogger("sp_compiler")
# Silent unless somebody asks: else logging would write warnings of a library by itself.
LOG.addHandler(logging.NullHandler())
VARIABLE = "SP_COMPILER_LOG"
_LEVELS = ("debug", "info", "warning", "error")


def log_as_asked() -> None:
    """Write to stderr what ``SP_COMPILER_LOG`` names: "info" is a line per pass while compiling.

    An application that sets up :mod:`logging` itself needs no variable: the logger is
    ``sp_compiler``.

    Raises:
        ArgumentError: no such level.
    """
    level = os.environ.get(VARIABLE, "").lower()
    if not level:
        return
    if level not in _LEVELS:
        raise ArgumentError(f"{VARIABLE}={level}: expected one of {', '.join(_LEVELS)}")
    LOG.setLevel(level.upper())
    # Once, however many models are compiled.
    if not any(isinstance(handler, _Handler) for handler in LOG.handlers):
        LOG.addHandler(_Handler())


class _Handler(logging.Handler):
    """Writes to what stderr is at the time, with the rank where there are several."""

    def emit(self, record: logging.LogRecord) -> None:
        rank = os.environ.get("RANK")
        where = f" rank {rank}" if rank is not None else ""
        sys.stderr.write(f"sp_compiler{where}: {record.getMessage()}\n")
