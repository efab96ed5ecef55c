"""Passes that are run: reports, stages, what settings share, the user's own, the fallback."""
