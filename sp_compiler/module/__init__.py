"""The module that a user calls instead of the model: its parameters, state and checkpoints."""
