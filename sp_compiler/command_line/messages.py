"""What a command says beside its result."""

from __future__ import annotations

from sp_compiler.base.errors import ArgumentError


class UsageError(ArgumentError):
    """A command that was put together wrong, which its help can show right."""


class Note(UserWarning):
    """What a command says on stderr beside its result."""
