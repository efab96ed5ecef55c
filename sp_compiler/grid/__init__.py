"""Code for several axes of a mesh: data parallelism, gradient norms."""
