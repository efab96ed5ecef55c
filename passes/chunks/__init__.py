"""Chunked loss heads: values with a row per token and a column per class, one chunk of rows at a
time."""
