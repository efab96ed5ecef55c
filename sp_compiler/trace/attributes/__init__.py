"""Attributes of the model's modules: which a compilation reads, and which a forward changes."""
