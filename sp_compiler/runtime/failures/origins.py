"""Errors of generated code, which say where in the user's model its statement comes from."""

from __future__ import annotations

from sp_compiler.base.errors import SPCompilerError
from sp_compiler.codegen.loading import origin_of


class _NamingOrigins:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Our own errors, such as of a rank that waits for another, say what is wrong and where.
        if isinstance(error, Exception) and not isinstance(error, SPCompilerError):
            origin = origin_of(error)
            # An error may pass through several contexts, as of a compiled module in an operator.
            if origin and origin not in getattr(error, "__notes__", ()):
                error.add_note(origin)


NAMING_ORIGINS = _NamingOrigins()
"""Context whose errors get :func:`~sp_compiler.codegen.loading.origin_of` as a note.

A single object, without state: a step enters it twice for every region.
"""
