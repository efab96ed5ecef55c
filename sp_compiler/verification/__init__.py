"""The compiled model against the original, on simulated ranks."""
