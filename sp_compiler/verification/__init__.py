"""Comparison of the compiled model with the original, on simulated ranks."""
