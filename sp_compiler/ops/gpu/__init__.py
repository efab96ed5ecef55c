"""Code that only a GPU needs.

Kernels in Triton, which may be missing where there is no GPU, are imported by the first call that
needs them.
"""
