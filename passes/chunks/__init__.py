"""Values with a row per token and a column per class, made a chunk of rows at a time."""
