"""Checks of placements in every compilation: two independent derivations."""

from __future__ import annotations

from sp_compiler.check.calls import check_calls
from sp_compiler.check.forward import check_forward
from sp_compiler.check.partitioned import check_partitioned
from sp_compiler.check.report import CheckReport

__all__ = ["CheckReport", "check_calls", "check_forward", "check_partitioned"]
