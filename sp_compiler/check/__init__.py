"""Checks of placements in every compilation.

:mod:`.forward` types the forward by the rules of ``spmd_types``, which are independent of the
sharding rules. :mod:`.partitioned` derives forward and backward by the rule table, which finds
values that the rewrite did not bring to the placement that an operator needs. A wrong row of the
table it does not find: ``verify=True`` does, which compares values with those of the model.
"""

from __future__ import annotations

from sp_compiler.check.calls import check_calls
from sp_compiler.check.forward import check_forward
from sp_compiler.check.partitioned import check_partitioned
from sp_compiler.check.report import CheckReport

__all__ = ["CheckReport", "check_calls", "check_forward", "check_partitioned"]
