"""Exact solvers on plain data: placements, recomputation, memory budgets. They see no graph."""
