"""Cost of a training step on a grid of tensor-, pipeline- and data-parallel ranks."""
