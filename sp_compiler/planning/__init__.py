"""The cost of a compiled program in readable form: tables, formulas, pages."""
