"""Features that PyTorch's DTensor lacks for an ordinary training loop."""
