"""Code that needs no graph: errors, placements, names and reports of passes, units."""
