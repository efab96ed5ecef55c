"""sp_compiler: turn an unmodified transformer into a tensor- and sequence-parallel module."""

from __future__ import annotations

from sp_compiler.api import compile
from sp_compiler.diff import GraphDiff, diff
from sp_compiler.errors import (
    ArgumentError,
    CaptureError,
    NotCompiledError,
    PassError,
    PlacementError,
    RankMismatchError,
    SPCompilerError,
    UnsupportedError,
)

__all__ = [
    "ArgumentError",
    "CaptureError",
    "GraphDiff",
    "NotCompiledError",
    "PassError",
    "PlacementError",
    "RankMismatchError",
    "SPCompilerError",
    "UnsupportedError",
    "compile",
    "diff",
]
__version__ = "0.1.0"
