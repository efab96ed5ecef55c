"""What a compiled program costs, for people: tables, formulas, pages."""
