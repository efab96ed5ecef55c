"""Training steps that are recorded once and replayed, so that the host launches two graphs a step
instead of thousands of kernels (``cuda_graphs=True``)."""
