"""Exact solvers on plain data, without graphs: placements, recomputation, memory budgets."""
