"""Handling of ranks that fail or are restarted."""
