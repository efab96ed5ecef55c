"""Ranks that fail, and ranks that are started again."""
