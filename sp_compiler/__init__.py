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
from sp_compiler.hints import forbid
from sp_compiler.plan import Plan
from sp_compiler.planning import plan
from sp_compiler.rules.custom import rule
from sp_compiler.verification import verify
from sp_compiler.verify_report import VerifyReport

__all__ = [
    "ArgumentError",
    "CaptureError",
    "GraphDiff",
    "NotCompiledError",
    "PassError",
    "PlacementError",
    "Plan",
    "RankMismatchError",
    "SPCompilerError",
    "UnsupportedError",
    "VerifyReport",
    "compile",
    "diff",
    "forbid",
    "plan",
    "rule",
    "verify",
]
__version__ = "0.1.0"
