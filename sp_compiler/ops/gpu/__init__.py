"""Kernels in Triton, which may be missing where there is no GPU: each is imported by the first call
that needs it."""
