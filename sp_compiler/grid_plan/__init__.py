"""What a training step costs on a grid of tensor, pipeline and data parallel ranks."""
