"""The cost of a compiled program for people to read: tables, formulas, pages."""
