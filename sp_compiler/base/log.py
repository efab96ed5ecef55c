"""The logger of the package, configured by ``SP_COMPILER_LOG``."""

from __future__ import annotations

import logging
import os
import sys

from sp_compiler.base.errors import ArgumentError, expected_one_of

# Without its own handler: Python then writes warnings and errors to stderr, such as why a step is
# compiled again, unless the application has handlers.
LOG = logging.getLogger("sp_compiler")
VARIABLE = "SP_COMPILER_LOG"
_LEVELS = ("debug", "info", "warning", "error")


def log_as_asked() -> None:
    """Log to stderr at the level in ``SP_COMPILER_LOG``; "info" is one line per pass while
    compiling.

    An application that configures :mod:`logging` itself can use the logger ``sp_compiler`` instead.

    Raises:
        ArgumentError: there is no such level.
    """
    level = os.environ.get(VARIABLE, "").lower()
    if not level:
        return
    if level not in _LEVELS:
        raise ArgumentError(f"{VARIABLE}={level}: {expected_one_of(level, _LEVELS)}")
    LOG.setLevel(level.upper())
    # Once, however many models are compiled.
    if not any(isinstance(handler, _Handler) for handler in LOG.handlers):
        LOG.addHandler(_Handler())


class _Handler(logging.Handler):
    """Writes to the current stderr, with the rank if there are several."""

    def emit(self, record: logging.LogRecord) -> None:
        rank = os.environ.get("RANK")
        where = f" rank {rank}" if rank is not None else ""
        sys.stderr.write(f"sp_compiler{where}: {record.getMessage()}\n")
