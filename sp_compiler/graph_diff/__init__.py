"""Differences between two graphs, programs or modules."""
