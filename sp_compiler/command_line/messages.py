"""Messages of a command in addition to its result."""

from __future__ import annotations

from sp_compiler.base.errors import ArgumentError


class UsageError(ArgumentError):
    """A command with wrong arguments; the error points to the command's ``--help``."""


class Note(UserWarning):
    """A message of a command on stderr, in addition to its result."""
