"""Keys by which calls find their programs, and messages about how keys differ."""
