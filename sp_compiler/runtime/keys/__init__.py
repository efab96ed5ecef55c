"""Keys by which calls find their programs, and what to say where they differ."""
