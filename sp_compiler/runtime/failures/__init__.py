"""Errors of generated code, and ranks that fail or are restarted."""
