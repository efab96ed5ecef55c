"""Chunked loss heads and attention: values with a row per token, and a column per class or key, one
chunk of rows at a time."""
